"""The check of schedules: whether one does what its workers have to do, and ends. A `ScheduleError` says what is wrong and shows the table
with the wrong cell marked.

The rules, each relying on those before it:
1. Every worker computes the forward and the backward of its stages' micro-batches once, sends and receives once what has to cross, and
   synchronises each of its stages once; the optimizer comes last.
2. A receive is posted before what needs it, and a send comes after what makes it; backward after forward; synchronisation after the last
   backward; what a worker hands to itself is made before it is used.
3. Between two workers the n-th activation sent is the n-th received, and so for gradients. Workers that share two stages synchronise them
   in the same order.
4. Nobody waits for ever. Receives are posted and sends go on by themselves, so only forwards and backwards wait. With `rendezvous` sends
   wait too, until their receive is posted, and so does synchronisation, until every replica is there: as a transport without buffers would.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from atoll.errors import ScheduleError
from atoll.runtime.modes.lockstep.schedule import Action, Schedule, Workers

__all__ = ["check", "marked_table"]

_WHOLE_ROW = 80  # actions of a worker that are shown whole
_AROUND = 8  # actions shown around a marked one, and at both ends, where a row is longer


class _Problem(NamedTuple):
    sentence: str
    marks: Mapping[tuple[int, int], str]  # worker and position → what to show there; a position after the last adds a cell


def check(schedule: Schedule, workers: Workers, *, rendezvous: bool = False) -> None:
    """Raise `ScheduleError` for the first rule that the schedule breaks; see the module's text for the rules."""
    for rule in (_every_action_once, _in_order_on_each_worker, _in_order_between_workers):
        for problem in rule(schedule, workers):
            raise _error(schedule, problem)
    stuck = _DryRun(schedule, workers, rendezvous).stuck()
    if stuck is not None:
        raise _error(schedule, stuck)


def _error(schedule: Schedule, problem: _Problem) -> ScheduleError:
    return ScheduleError(f"{problem.sentence}\n\n{marked_table(schedule, problem.marks)}")


def marked_table(schedule: Schedule, marks: Mapping[tuple[int, int], str] | None = None) -> str:
    """The schedule's lines with the cells at (worker, position) replaced and marked; of long lines what is near a mark and the ends."""
    marks = marks or {}
    width = len(str(len(schedule) - 1))
    lines = []
    for worker, row in enumerate(schedule.actions):
        cells = {index: str(action) for index, action in enumerate(row)}
        wrong = {index: f"▶{text}◀" for (w, index), text in marks.items() if w == worker}
        lines.append(f"  {worker:>{width}}: {_elided({**cells, **wrong}, sorted(wrong))}".rstrip())
    lines += [f"  {worker}: ▶{text}◀" for (worker, _), text in marks.items() if worker >= len(schedule)]
    return "\n".join(lines)


def _elided(cells: dict[int, str], near: list[int]) -> str:
    if len(cells) <= _WHOLE_ROW:
        return " ".join(cells.values())
    centres = [0, *near, len(cells) - 1]
    shown = [index for index in cells if any(abs(index - centre) <= _AROUND for centre in centres)]
    parts: list[str] = []
    last = -1
    for index in shown:
        if index > last + 1:
            parts.append(f"…{index - last - 1} more…")
        parts.append(cells[index])
        last = index
    return " ".join(parts)


def _expected(workers: Workers) -> list[dict[Action, None]]:
    """What each worker has to do, in an order that reads well."""
    expected: list[dict[Action, None]] = [{} for _ in range(workers.count)]
    for s in range(workers.stages):
        for m in range(workers.micro_batches):
            mine = expected[workers.home(s, m)]
            mine |= dict.fromkeys([Action("F", s, m), Action("B", s, m)])
            mine |= dict.fromkeys([Action("SF", s, m), Action("RB", s, m)] if workers.crosses(s, m) else [])
            mine |= dict.fromkeys([Action("RF", s, m), Action("SB", s, m)] if workers.crosses(s - 1, m) else [])
        for worker in workers.homes[s]:
            expected[worker][Action("G", s)] = None
    for mine in expected:
        mine[Action("O")] = None
    return expected


def _every_action_once(schedule: Schedule, workers: Workers) -> Iterator[_Problem]:
    if len(schedule) > workers.count:
        names = f"there are {workers.count} workers, numbered from 0"
        yield _Problem(f"there is no worker {workers.count}: {names}", {(workers.count, 0): "no such worker"})
    for worker, expected in enumerate(_expected(workers)):
        row = schedule[worker] if worker < len(schedule) else ()
        seen: set[Action] = set()
        for index, action in enumerate(row):
            if action not in expected:
                yield _Problem(f"worker {worker}: {_why_unexpected(action, worker, workers)}", {(worker, index): str(action)})
            if action in seen:
                yield _Problem(f"worker {worker} does {action} twice", {(worker, index): str(action)})
            seen.add(action)
        for action in expected:
            if action not in seen:
                yield _Problem(f"worker {worker} never does {action}{_purpose(action, workers)}", {(worker, len(row)): f"no {action}"})


def _why_unexpected(action: Action, worker: int, workers: Workers) -> str:
    stage, m = action.stage, action.micro_batch
    if stage >= workers.stages:
        return f"{action}: there is no stage {stage}; there are {workers.stages}, numbered from 0"
    if m >= workers.micro_batches:
        return f"{action}: there is no micro-batch {m}; there are {workers.micro_batches}, numbered from 0"
    if m < 0 or workers.home(stage, m) != worker:
        owners = workers.homes[stage] if m < 0 else [workers.home(stage, m)]
        return f"{action}: this is for worker {' and '.join(map(str, owners))} to do"
    other = stage + 1 if action.kind in ("SF", "RB") else stage - 1
    if not 0 <= other < workers.stages:
        return f"{action}: stage {stage} has nobody to {'send to' if action.sends else 'receive from'} on that side"
    return f"{action}: stages {min(stage, other)} and {max(stage, other)} of micro-batch {m} are both here, so nothing is sent"


def _purpose(action: Action, workers: Workers) -> str:
    if action.receives:
        return f", but worker {workers.peer(action)} must send it by {action.sent_as}"
    if action.sends:
        return f", but worker {workers.peer(action)} must receive it by {action.received_as}"
    return ""


def _in_order_on_each_worker(schedule: Schedule, workers: Workers) -> Iterator[_Problem]:
    for worker, row in enumerate(schedule.actions):
        done: set[Action] = set()
        left = {stage: sum(action.kind == "B" and action.stage == stage for action in row) for stage in workers.stages_of[worker]}
        for index, action in enumerate(row):
            for first in _needed_before(action, workers):
                if first not in done:
                    yield _Problem(f"worker {worker} does {action} before {first}", {(worker, index): str(action)})
            if action.kind == "G" and left[action.stage]:
                sentence = f"worker {worker} synchronises stage {action.stage} before its last backward"
                yield _Problem(sentence, {(worker, index): str(action)})
            if index and row[index - 1].kind == "O":
                yield _Problem(f"worker {worker} does {action} after the optimizer's step", {(worker, index): str(action)})
            left[action.stage] = left.get(action.stage, 0) - (action.kind == "B")
            done.add(action)


def _needed_before(action: Action, workers: Workers) -> list[Action]:
    """What the same worker must have done before an action."""
    stage, m = action.stage, action.micro_batch
    if action.kind == "F":
        if stage == 0:
            return []
        return [Action("RF", stage, m) if workers.crosses(stage - 1, m) else Action("F", stage - 1, m)]
    if action.kind == "B":
        last = stage == workers.stages - 1
        gradient = [] if last else [Action("RB", stage, m) if workers.crosses(stage, m) else Action("B", stage + 1, m)]
        return [Action("F", stage, m), *gradient]
    if action.kind in ("SF", "SB"):
        return [Action("F" if action.kind == "SF" else "B", stage, m)]
    return []


_Channel = tuple[int, int, str]  # sender, receiver, SF or SB
_Cell = tuple[int, int]  # worker, position


def _in_order_between_workers(schedule: Schedule, workers: Workers) -> Iterator[_Problem]:
    sent: dict[_Channel, list[Action]] = {}
    received: dict[_Channel, list[tuple[Action, _Cell]]] = {}
    synchronised: list[dict[int, int]] = [{} for _ in schedule.actions]  # position of each stage's G, by worker
    for worker, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            if action.sends:
                sent.setdefault((worker, workers.peer(action), action.kind), []).append(action)
            elif action.receives:
                received.setdefault((workers.peer(action), worker, action.sent_as.kind), []).append((action, (worker, index)))
            elif action.kind == "G":
                synchronised[worker][action.stage] = index
    for channel, sends in sent.items():
        for number, (send, (receive, cell)) in enumerate(zip(sends, received[channel], strict=True), 1):
            if receive.sent_as != send:
                what = f"transfer {number} from worker {channel[0]} to worker {channel[1]} is {send}"
                yield _Problem(f"{what}, but {receive} is received: they must be in the same order", {cell: str(receive)})
    yield from _synchronised_alike(synchronised)


def _synchronised_alike(synchronised: list[dict[int, int]]) -> Iterator[_Problem]:
    first: dict[tuple[int, int], int] = {}  # of two stages in this order, the first worker that synchronises them so
    for worker, positions in enumerate(synchronised):
        for a, b in combinations(sorted(positions, key=positions.__getitem__), 2):
            if (b, a) in first:
                order = f"worker {first[b, a]} synchronises stage {b} before {a}, but worker {worker} stage {a} before {b}"
                yield _Problem(f"{order}: they would not meet", {(worker, positions[a]): f"{a}G"})
            first.setdefault((a, b), worker)


class _DryRun:
    """A schedule, run without computing or sending anything."""

    def __init__(self, schedule: Schedule, workers: Workers, rendezvous: bool) -> None:
        self.schedule, self.workers, self.rendezvous = schedule, workers, rendezvous
        self.position = [0] * len(schedule)
        self.done: set[tuple[int, Action]] = set()

    def stuck(self) -> _Problem | None:
        """Runs everybody as far as possible; what is wrong if that is not to the end."""
        waiting: dict[tuple[int, Action], list[int]] = {}  # who waits for a worker's action
        able = list(range(len(self.schedule)))
        while able:
            worker = able.pop()
            row = self.schedule[worker]
            while self.position[worker] < len(row):
                action = row[self.position[worker]]
                if self.rendezvous and action.kind == "G":  # whoever waits there has come to it
                    self.done.add((worker, action))
                    able += waiting.pop((worker, action), [])
                awaited = self._awaited(worker, action)
                if awaited is not None:
                    waiting.setdefault(awaited, []).append(worker)
                    break
                self.done.add((worker, action))
                able += waiting.pop((worker, action), [])
                self.position[worker] += 1
        if all(at == len(row) for at, row in zip(self.position, self.schedule.actions, strict=True)):
            return None
        return self._circle()

    def _awaited(self, worker: int, action: Action) -> tuple[int, Action] | None:
        """The worker and its action for which this one has to wait, if that is not done yet."""
        stage, m = action.stage, action.micro_batch
        awaited: list[tuple[int, Action]] = []
        if action.kind == "F" and self.workers.crosses(stage - 1, m):
            awaited = [(self.workers.home(stage - 1, m), Action("SF", stage - 1, m))]
        elif action.kind == "B" and self.workers.crosses(stage, m):
            awaited = [(self.workers.home(stage + 1, m), Action("SB", stage + 1, m))]
        elif self.rendezvous and action.sends:
            awaited = [(self.workers.peer(action), action.received_as)]
        elif self.rendezvous and action.kind == "G":
            awaited = [(other, action) for other in self.workers.homes[stage] if other != worker]
        return next((item for item in awaited if item not in self.done), None)

    def _circle(self) -> _Problem:
        """Who waits for whom: from any worker that waits, along what it waits for, until a worker comes again."""
        worker = next(w for w, at in enumerate(self.position) if at < len(self.schedule[w]))
        path: dict[int, tuple[Action, int, Action]] = {}
        while worker not in path:
            action = self.schedule[worker][self.position[worker]]
            awaited = self._awaited(worker, action)
            assert awaited is not None, "a worker stopped, but not because it waits"
            path[worker] = (action, *awaited)
            worker = awaited[0]
        circle = list(path)[list(path).index(worker) :]
        waits = [f"worker {w} waits at {path[w][0]} for worker {path[w][1]} to do {path[w][2]}" for w in circle]
        sentence = f"the schedule would wait for ever: {'; '.join(waits)}"
        return _Problem(sentence, {(w, self.position[w]): str(path[w][0]) for w in circle})
