"""The check against an interpreter that knows no rules: it runs a schedule action by action and sees whether everything gets done."""

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ScheduleError
from atoll.runtime.modes.lockstep.schedule import Action, Schedule, Workers
from atoll.runtime.modes.lockstep.schedule_builder import make_schedule, post_receives_early
from atoll.runtime.modes.lockstep.schedule_check import check, marked_table
from tests.runtime.modes.lockstep.schedule_cases import SCHEDULES, any_workers, column, random_workers


class Interpreter:
    """Workers with queues between them; an action that cannot be done yet is tried again later."""

    def __init__(self, schedule: Schedule, right: Schedule, workers: Workers, rendezvous: bool) -> None:
        self.right = right  # whose actions, in whatever order, are what there is to do
        self.rows, self.workers, self.rendezvous = [list(row) for row in schedule.actions], workers, rendezvous
        self.done: list[set[Action]] = [set() for _ in self.rows]
        self.sent: dict[tuple[int, int, str], list[tuple[int, int]]] = {}  # boundary and micro-batch, by sender, receiver, direction
        self.posted: dict[tuple[int, int, str], list[tuple[int, int]]] = {}

    def runs(self) -> bool:
        """Whether everybody comes to the end, having done what there is to do."""
        if [Counter(row) for row in self.rows] != [Counter(row) for row in self.right.actions]:
            return False
        for one, other in combinations([[a for a in row if a.kind == "G"] for row in self.rows], 2):
            if [a for a in one if a in other] != [a for a in other if a in one]:
                return False
        while any(self.rows):
            if not sum(self.step(worker) for worker in range(len(self.rows))):
                return False
        return self.sent == self.posted

    def step(self, worker: int) -> bool:
        if not self.rows[worker] or not self.possible(worker, self.rows[worker][0]):
            return False
        action = self.rows[worker].pop(0)
        self.done[worker].add(action)
        if action.sends or action.receives:
            channel, item = self.transfer(worker, action)
            (self.sent if action.sends else self.posted).setdefault(channel, []).append(item)
        return True

    def transfer(self, worker: int, action: Action) -> tuple[tuple[int, int, str], tuple[int, int]]:
        boundary = action.stage - (action.kind in ("RF", "SB"))
        other = self.workers.home(boundary + (action.stage == boundary), action.micro_batch)
        ends = (worker, other) if action.sends else (other, worker)
        return (*ends, action.kind[1]), (boundary, action.micro_batch)

    def possible(self, worker: int, action: Action) -> bool:
        stage, m, done = action.stage, action.micro_batch, self.done[worker]
        if action.kind == "F":
            return stage == 0 or self.arrived(worker, stage - 1, m, "F", Action("F", stage - 1, m))
        if action.kind == "B":
            last = stage == self.workers.stages - 1
            return Action("F", stage, m) in done and (last or self.arrived(worker, stage, m, "B", Action("B", stage + 1, m)))
        if action.sends:
            channel, _ = self.transfer(worker, action)
            free = not self.rendezvous or len(self.posted.get(channel, [])) > len(self.sent.get(channel, []))
            return Action("F" if action.kind == "SF" else "B", stage, m) in done and free
        left = [a for a in self.rows[worker] if a != action]
        if action.kind == "G":
            peers = [w for w in self.workers.homes[stage] if w != worker]
            together = not self.rendezvous or all(action in self.done[w] or self.rows[w][:1] == [action] for w in peers)
            return together and not any(a.kind == "B" and a.stage == stage for a in left)
        return action.kind != "O" or not left

    def arrived(self, worker: int, boundary: int, m: int, direction: str, local: Action) -> bool:
        here, there = self.workers.home(boundary, m), self.workers.home(boundary + 1, m)
        if here == there:
            return local in self.done[worker]
        channel = (here, there, "F") if direction == "F" else (there, here, "B")
        posted, sent = self.posted.get(channel, []), self.sent.get(channel, [])
        return (boundary, m) in posted and sent[posted.index((boundary, m)) :][:1] == [(boundary, m)]


def passes(schedule: Schedule, workers: Workers, rendezvous: bool) -> bool:
    message = ""
    try:
        check(schedule, workers, rendezvous=rendezvous)
    except ScheduleError as error:
        message = str(error)
    assert not message or "▶" in message  # every error shows the cell
    return not message


def mutated(schedule: Schedule, numbers: random.Random) -> Schedule:
    """The schedule with one thing wrong with it, perhaps."""
    rows = [list(row) for row in schedule.actions]
    row = numbers.choice(rows)
    at, to = numbers.randrange(len(row)), numbers.randrange(len(row))
    how = numbers.choice(["swap", "swap near", "move", "drop", "double", "give away", "rename"])
    if how == "swap near":
        to = min(at + 1, len(row) - 1)
    if how.startswith("swap"):
        row[at], row[to] = row[to], row[at]
    elif how == "move":
        row.insert(to, row.pop(at))
    elif how == "drop":
        row.pop(at)
    elif how == "double":
        row.insert(to, row[at])
    elif how == "give away":
        other = numbers.choice(rows)
        other.insert(numbers.randrange(len(other)), row.pop(at))
    elif row[at].micro_batch >= 0:
        row[at] = Action(
            numbers.choice(["F", "RF", "SB"]), row[at].stage + numbers.randint(0, 1), row[at].micro_batch + numbers.randint(0, 1)
        )
    return Schedule(tuple(map(tuple, rows)))


def test_mistakes_are_caught_and_only_mistakes() -> None:
    numbers = random.Random(1)
    outcomes: Counter[bool] = Counter()
    for _ in range(200):
        workers = random_workers(numbers)
        right = post_receives_early(make_schedule(numbers.choice(["gpipe", "1f1b", "interleaved"]), workers), numbers.randint(0, 2))
        for _ in range(6):
            schedule = mutated(right, numbers)
            if numbers.random() < 0.3:
                schedule = mutated(schedule, numbers)
            rendezvous = numbers.random() < 0.5
            runs = Interpreter(schedule, right, workers, rendezvous).runs()
            assert passes(schedule, workers, rendezvous) == runs, f"{workers}\n{schedule}"
            outcomes[runs] += 1
    assert min(outcomes.values()) > 100


@given(any_workers, SCHEDULES, st.integers(0, 2), st.booleans())
def test_right_schedules_pass_where_the_interpreter_comes_through(workers: Workers, name: str, ahead: int, rendezvous: bool) -> None:
    schedule = post_receives_early(make_schedule(name, workers), ahead)
    assert passes(schedule, workers, rendezvous) == Interpreter(schedule, schedule, workers, rendezvous).runs()
    assert rendezvous or passes(schedule, workers, rendezvous)


def test_a_deadlock_names_who_waits_for_whom() -> None:
    crossed = Schedule.parse("0: 0F0 0SF0 0RB0 0B0 0F1 0SF1 0RB1 0B1 0G O\n1: 1RF0 1RF1 1F0 1F1 1B0 1SB0 1B1 1SB1 1G O")
    with pytest.raises(ScheduleError) as caught:
        check(crossed, column(2, 2))
    assert str(caught.value) == (
        "the schedule would wait for ever: worker 0 waits at 0B0 for worker 1 to do 1SB0; worker 1 waits at 1F1 for worker 0 to do 0SF1\n\n"
        "  0: 0F0 0SF0 0RB0 ▶0B0◀ 0F1 0SF1 0RB1 0B1 0G O\n"
        "  1: 1RF0 1RF1 1F0 ▶1F1◀ 1B0 1SB0 1B1 1SB1 1G O"
    )


def test_1f1b_needs_receives_posted_ahead_where_sends_block() -> None:
    workers = column(3, 4)
    schedule = make_schedule("1f1b", workers)
    with pytest.raises(
        ScheduleError, match="worker 1 waits at 1SF1 for worker 2 to do 2RF1; worker 2 waits at 2SB0 for worker 1 to do 1RB0"
    ):
        check(schedule, workers, rendezvous=True)
    check(post_receives_early(schedule), workers, rendezvous=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: 0F0 0SF0 0RB0 0B0 0G O", "worker 1 never does 1F0"),
        ("0: 0F0 0SF0 0RB0 0B0 0G O\n1: 1RF0 1F0 1B0 1SB0 1G O\n2: O", "there is no worker 2: there are 2 workers, numbered from 0"),
        ("0: 0F0 0SF0 0RB0 0B0 0G O\n1: 1F0 1B0 1SB0 1G O", "worker 1 never does 1RF0, but worker 0 must send it by 0SF0"),
        ("0: 0F0 0RB0 0B0 0G O\n1: 1RF0 1F0 1B0 1SB0 1G O", "worker 0 never does 0SF0, but worker 1 must receive it by 1RF0"),
        ("0: 0F0 0F0 0SF0 0RB0 0B0 0G O\n1: 1RF0 1F0 1B0 1SB0 1G O", "worker 0 does 0F0 twice"),
        ("0: 0F0 2F0", "worker 0: 2F0: there is no stage 2; there are 2, numbered from 0"),
        ("0: 0F0 0F1", "worker 0: 0F1: there is no micro-batch 1; there are 1, numbered from 0"),
        ("0: 1F0", "worker 0: 1F0: this is for worker 1 to do"),
        ("0: 1G", "worker 0: 1G: this is for worker 1 to do"),
        ("0: 0RF0", "worker 0: 0RF0: stage 0 has nobody to receive from on that side"),
        ("0: 0F0 0SF0 0RB0 0B0 0G O\n1: 1RF0 1B0 1F0 1SB0 1G O", "worker 1 does 1B0 before 1F0"),
        ("0: 0F0 0SF0 0RB0 0B0 0G O\n1: 1F0 1RF0 1B0 1SB0 1G O", "worker 1 does 1F0 before 1RF0"),
        ("0: 0F0 0SF0 0RB0 0G 0B0 O\n1: 1RF0 1F0 1B0 1SB0 1G O", "worker 0 synchronises stage 0 before its last backward"),
        ("0: 0F0 0SF0 0RB0 0B0 O 0G\n1: 1RF0 1F0 1B0 1SB0 1G O", "worker 0 does 0G after the optimizer's step"),
    ],
)
def test_mistakes_are_said_in_a_sentence(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.parse(text), column(2, 1))
    assert str(caught.value).split("\n")[0].startswith(message)
    assert "▶" in str(caught.value)


def test_transfers_keep_their_order() -> None:
    text = "0: 0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1 0G O\n1: 1RF1 1F1 1RF0 1F0 1B0 1SB0 1B1 1SB1 1G O"
    with pytest.raises(ScheduleError, match="transfer 1 from worker 0 to worker 1 is 0SF0, but 1RF1 is received"):
        check(Schedule.parse(text), column(2, 2))


def test_stages_are_synchronised_in_the_same_order_everywhere() -> None:
    workers = Workers(((0, 1), (0, 1)), ((0, 1), (0, 1)))
    check(Schedule.parse("0: 0F0 1F0 1B0 0B0 0G 1G O\n1: 0F1 1F1 1B1 0B1 0G 1G O"), workers)
    with pytest.raises(ScheduleError, match="worker 0 synchronises stage 0 before 1, but worker 1 stage 1 before 0: they would not meet"):
        check(Schedule.parse("0: 0F0 1F0 1B0 0B0 0G 1G O\n1: 0F1 1F1 1B1 0B1 1G 0G O"), workers)


def test_what_is_handed_over_on_one_worker_is_not_sent() -> None:
    with pytest.raises(ScheduleError, match="0SF0: stages 0 and 1 of micro-batch 0 are both here, so nothing is sent"):
        check(Schedule.parse("0: 0F0 0SF0 1F0 1B0 0B0 1G 0G O"), Workers(((0,), (0,)), ((0,), (0,))))


def test_long_rows_are_shown_around_the_mark() -> None:
    schedule = make_schedule("1f1b", column(2, 100))
    shown = marked_table(schedule, {(1, 200): "here"})
    assert "▶here◀" in shown
    assert max(map(len, shown.splitlines())) < 400
    assert shown.splitlines()[0].startswith("  0: 0F0 0SF0")
    assert shown.splitlines()[0].endswith("0B99 0G O")
