"""The schedule builder: from a plan's schedule and its workers to the Schedule they follow.

One engine makes all of them. It plays a step on a clock (a forward takes 1, a backward 2) and notes who computed what in which order. Its
policy is that of 1F1B: a forward while there is room, else a backward, waiting for either if need be. Of several inputs a worker takes the
earliest micro-batch that has arrived; a worker with several stages keeps to Megatron-LM's order: a block of as many micro-batches as the
pipeline is deep through one stage, then through the next. In a column of stages all of this is decided by the limits alone, so it gives
classic GPipe, 1F1B and interleaved 1F1B whatever the times are; with other routes the order is what those times make of it. The policy is
`plan/schedule_policy.py`, by which `cost/pipeline.py` predicts a step.

Room is what that policy says a replica may hold, since memory was planned for that much: no schedule ever holds more. Should all
wait in a circle, one takes another task that is ready. There always is one: a micro-batch takes its room stage by stage, the last stage
needs no other's, and going back needs none.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from atoll.plan import Plan, Replica, Stage
from atoll.plan import Schedule as PlanSchedule
from atoll.plan.division import micro_batch_counts
from atoll.plan.schedule_policy import device_limits, forward_next, in_flight_bounds
from atoll.runtime.modes.lockstep.schedule import Action, Schedule, Workers

__all__ = ["compute_order", "in_flight_limits", "make_schedule", "post_receives_early"]

_Limits = Sequence[Sequence[int]]  # by stage and replica


def make_schedule(plan_schedule: PlanSchedule, workers: Workers) -> Schedule:
    """The schedule of one step."""
    return _with_communication(compute_order(plan_schedule, workers), workers)


def in_flight_limits(plan_schedule: PlanSchedule, workers: Workers) -> list[list[int]]:
    """The most micro-batches each replica of each stage may hold: what memory was planned for."""
    plan = _shape(plan_schedule, workers)
    counts = micro_batch_counts(plan)
    return [[max(limit, min(1, n)) for limit, n in zip(*rows, strict=True)] for rows in zip(in_flight_bounds(plan), counts, strict=True)]


def _shape(plan_schedule: PlanSchedule, workers: Workers) -> Plan:
    """A plan with these workers for devices: what the bounds on micro-batches in flight are made from."""
    stages = []
    for s, (homes, route) in enumerate(zip(workers.homes, workers.route, strict=True)):
        replicas = tuple(Replica(devices=(str(worker),), samples=(route.count(r),)) for r, worker in enumerate(homes))
        stages.append(Stage(start=s, stop=s + 1, replicas=replicas))
    return Plan(graph="", cluster="", batch_size=workers.micro_batches, micro_batch_size=1, stages=tuple(stages), schedule=plan_schedule)


def compute_order(plan_schedule: PlanSchedule, workers: Workers) -> list[list[Action]]:
    """The forwards and backwards of each worker, in order."""
    bounds = in_flight_limits(plan_schedule, workers)
    room = _worker_limits(plan_schedule, workers, bounds)
    played = [_Clock(workers, bounds, room, policy).play() for policy in _policies(workers)]
    return min(played, key=lambda pair: pair[0])[1]  # the first of equals


def _worker_limits(plan_schedule: PlanSchedule, workers: Workers, bounds: _Limits) -> list[int]:
    """What each worker holds of all its stages before it prefers a backward."""
    room = [0] * workers.count
    for homes, row in zip(workers.homes, bounds, strict=True):
        for worker, limit in zip(homes, row, strict=True):
            room[worker] += limit
    if plan_schedule == "gpipe" or all(len(stages) == 1 for stages in workers.stages_of):
        return room
    plan = _shape(plan_schedule, workers)
    groups: dict[tuple[str, ...], int] = {(str(worker),): worker for worker in range(workers.count)}
    return [max(1, min(pair)) for pair in zip(room, device_limits(plan, micro_batch_counts(plan), groups), strict=True)]


class _Policy(NamedTuple):
    """What a worker prefers where it has a choice."""

    block: int  # micro-batches that go through a stage before a worker with several turns to its next
    in_turn: bool = True  # a worker with several stages waits for what is next in its order, rather than take what has arrived
    eager: bool = False  # a worker that would wait takes what is ready


def _policies(workers: Workers) -> list[_Policy]:
    """The policies to try: one where it is known to be right, in columns whose micro-batches make whole blocks."""
    depth = len({workers.home(s, 0) for s in range(workers.stages)}) if workers.micro_batches else 1
    virtual = any(len(stages) > 1 for stages in workers.stages_of)
    columns = Counter(workers.route[0]) if _in_columns(workers) else Counter()
    if columns and not (virtual and any(count % depth for count in columns.values())):
        return [_Policy(depth)]
    blocks = {depth}
    if virtual and columns:
        blocks |= {-(-count // max(1, count // depth)) for count in columns.values()}  # as many blocks, of nearly the same size
    elif virtual:
        blocks.add(depth * max(len(set(row)) for row in workers.route))
    return [_Policy(block, in_turn, eager) for in_turn, eager in ((True, False), (False, False), (False, True)) for block in sorted(blocks)]


def _in_columns(workers: Workers) -> bool:
    return all(row == workers.route[0] for row in workers.route)


class _Input(NamedTuple):
    """A task whose input has arrived; those a worker prefers sort first."""

    block: int
    stage: int  # negative for backwards: the last stage comes first
    micro_batch: int


_Source = tuple[int, int]  # sender and -1; or, for what a worker hands to itself, the worker and the stage


class _Inbox:
    """What has arrived at a worker for its forwards, or for its backwards. What one worker sent is taken in the order it was sent."""

    def __init__(self) -> None:
        self._queues: dict[_Source, deque[_Input]] = {}

    def put(self, source: _Source, item: _Input) -> None:
        self._queues.setdefault(source, deque()).append(item)

    def heads(self) -> Iterator[_Input]:
        """What may be taken next."""
        return (queue[0] for queue in self._queues.values() if queue)

    def all(self) -> Iterator[_Input]:
        """Everything, in whatever order."""
        return (item for queue in self._queues.values() for item in queue)

    def take(self, item: _Input) -> None:
        for queue in self._queues.values():
            if queue and queue[0] == item:
                queue.popleft()
                return
        next(queue for queue in self._queues.values() if item in queue).remove(item)


class _Turns:
    """The order in which a worker with several stages takes its tasks of one direction."""

    def __init__(self, items: list[_Input]) -> None:
        self._left = sorted(items, reverse=True)
        self._done: set[_Input] = set()

    @property
    def next(self) -> _Input | None:
        while self._left and self._left[-1] in self._done:
            self._done.remove(self._left.pop())
        return self._left[-1] if self._left else None

    def note(self, item: _Input) -> None:
        self._done.add(item)


class _Clock:
    """A step, played in order of time."""

    def __init__(self, workers: Workers, limits: _Limits, room: Sequence[int], policy: _Policy) -> None:
        self.workers, self.limits, self.room, self.policy = workers, limits, room, policy
        self.blocks = _blocks(workers, policy.block)
        self.inboxes = [(_Inbox(), _Inbox()) for _ in range(workers.count)]  # forwards, backwards
        self.orders: list[list[Action]] = [[] for _ in range(workers.count)]
        self.holding = [[0] * len(homes) for homes in workers.homes]
        self.held = [0] * workers.count
        self.forwards_left = [0] * workers.count
        tasks: list[list[_Input]] = [[] for _ in range(workers.count)]
        for m in range(workers.micro_batches):
            for s in range(workers.stages):
                home = workers.home(s, m)
                self.forwards_left[home] += 1
                tasks[home].append(_Input(self.blocks[m], s, m))
            self.inboxes[workers.home(0, m)][0].put((-1, -1), _Input(self.blocks[m], 0, m))
        self.turns = [
            (_Turns(items), _Turns([item._replace(stage=-item.stage) for item in items])) if len(stages) > 1 and policy.in_turn else None
            for items, stages in zip(tasks, workers.stages_of, strict=True)
        ]
        self.ends: list[tuple[float, int, Action]] = []
        self.idle = set(range(workers.count))

    def play(self) -> tuple[float, list[list[Action]]]:
        """Takes the ends of tasks in order of time: what was made is handed on, and whoever is free and has an input begins a task.
        Returns how long the step is, and what each worker did."""
        now, looking = 0.0, sorted(self.idle)
        while True:
            for worker in looking:
                if worker in self.idle and (choice := self._choice(worker)):
                    self._begin(worker, *choice, now)
            if not self.ends:
                if not any(map(any, self.holding)) and not any(self.forwards_left):
                    return now, self.orders
                self._begin(*self._whatever_is_ready(), now)
            now = self.ends[0][0]
            touched = set()
            while self.ends and self.ends[0][0] == now:
                _, worker, action = heappop(self.ends)
                self.idle.add(worker)
                touched |= {worker, self._hand_on(worker, action)}
            looking = sorted(touched)

    def _choice(self, worker: int) -> tuple[bool, _Input] | None:
        """What the policy says a free worker does now: backward or not, and which; `None`: wait."""
        backward = not forward_next(self.forwards_left[worker], self.held[worker], self.room[worker])
        return self._preferred(worker, backward) or (self._preferred(worker, not backward) if self.policy.eager else None)

    def _preferred(self, worker: int, backward: bool) -> tuple[bool, _Input] | None:
        heads = [item for item in self.inboxes[worker][backward].heads() if backward or self._fits(item)]
        turns = self.turns[worker]
        if turns is None:
            return (backward, min(heads)) if heads else None
        item = turns[backward].next
        return (backward, item) if item is not None and item in heads else None

    def _whatever_is_ready(self) -> tuple[int, bool, _Input]:
        """All wait for each other: a task against the policy, but within limits. Not to keep to the order of sending is the last resort."""
        for look in (_Inbox.heads, _Inbox.all):
            for backward in (True, False):
                ready = [(item, w) for w in sorted(self.idle) for item in look(self.inboxes[w][backward]) if backward or self._fits(item)]
                if ready:
                    item, worker = min(ready)
                    return worker, backward, item
        raise AssertionError("micro-batches are left, but none can go on")

    def _fits(self, item: _Input) -> bool:
        replica = self.workers.route[item.stage][item.micro_batch]
        return self.holding[item.stage][replica] < self.limits[item.stage][replica]

    def _begin(self, worker: int, backward: bool, item: _Input, now: float) -> None:
        self.inboxes[worker][backward].take(item)
        if turns := self.turns[worker]:
            turns[backward].note(item)
        stage, m = abs(item.stage), item.micro_batch
        replica = self.workers.route[stage][m]
        change = -1 if backward else 1
        self.holding[stage][replica] += change
        self.held[worker] += change
        self.forwards_left[worker] -= not backward
        action = Action("B" if backward else "F", stage, m)
        self.orders[worker].append(action)
        self.idle.remove(worker)
        heappush(self.ends, (now + 1 + backward, worker, action))

    def _hand_on(self, worker: int, action: Action) -> int:
        """Gives what a task made to whoever needs it; returns that worker."""
        stage, m = action.stage, action.micro_batch
        backward = action.kind == "B" or stage == self.workers.stages - 1
        following = stage - 1 if action.kind == "B" else stage if backward else stage + 1
        if following < 0:
            return worker
        home = self.workers.home(following, m)
        source = (worker, following if home == worker else -1)
        self.inboxes[home][backward].put(source, _Input(self.blocks[m], -following if backward else following, m))
        return home


def _blocks(workers: Workers, size: int) -> list[int]:
    """The block each micro-batch belongs to: a worker with several stages turns to the next one after a block."""
    columns = _in_columns(workers)
    seen: dict[int, int] = {}
    blocks = []
    for m, replica in enumerate(workers.route[0]):
        number = seen.get(replica, 0) if columns else m  # in its column
        seen[replica] = number + 1
        blocks.append(number // size)
    return blocks


def _with_communication(orders: Sequence[Sequence[Action]], workers: Workers) -> Schedule:
    """Adds sends, receives, gradient synchronisation and the optimizer to the forwards and backwards of each worker.

    A send follows what made it; a receive stands before what needs it, or before the first that needs something sent later by the same
    worker, since receives are posted in the order of sends. Gradients are synchronised once the last of them is there, and those of
    later stages are: so that workers with the same stages do so in the same order.
    """
    received = _receives(orders, workers)
    rows = []
    for worker, order in enumerate(orders):
        row: list[Action] = []
        left = Counter(action.stage for action in order if action.kind == "B")
        unsynchronised = list(workers.stages_of[worker])
        for index, action in enumerate(order):
            row += received[worker][index]
            row.append(action)
            if (send := _send_after(action, workers)) is not None:
                row.append(send)
            left[action.stage] -= action.kind == "B"
            while action.kind == "B" and unsynchronised and not left[unsynchronised[-1]]:  # from the last stage, so that all agree
                row.append(Action("G", unsynchronised.pop()))
        row += [Action("G", stage) for stage in reversed(unsynchronised)]  # a worker without a micro-batch has peers that have some
        rows.append((*row, Action("O")))
    return Schedule(tuple(rows))


def _send_after(action: Action, workers: Workers) -> Action | None:
    stage, m = action.stage, action.micro_batch
    if action.kind == "F":
        return Action("SF", stage, m) if workers.crosses(stage, m) else None
    return Action("SB", stage, m) if workers.crosses(stage - 1, m) else None


def _receives(orders: Sequence[Sequence[Action]], workers: Workers) -> list[list[list[Action]]]:
    """The receives in front of each worker's forwards and backwards."""
    position = {action: index for order in orders for index, action in enumerate(order)}
    received: list[list[list[Action]]] = [[[] for _ in order] for order in orders]
    for order in orders:
        earliest: dict[tuple[int, str], int] = {}  # by receiver and direction: where the receives of what is sent later stand
        for action in reversed(order):
            if (send := _send_after(action, workers)) is not None:
                receive = send.received_as
                channel = (workers.peer(send), send.kind)
                index = position[Action(action.kind, receive.stage, receive.micro_batch)]
                earliest[channel] = min(index, earliest.get(channel, index))
                received[channel[0]][earliest[channel]].insert(0, receive)
    return received


def post_receives_early(schedule: Schedule, ahead: int = 1) -> Schedule:
    """The schedule with every receive moved up by `ahead` forwards or backwards, so that it is under way while those are computed."""
    return Schedule(tuple(_moved_up(row, ahead) for row in schedule.actions))


def _moved_up(row: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """A worker's actions with its receives moved up; what arrives from one worker stays in order."""
    before: list[list[Action]] = [[] for action in row if action.computes]
    passed = 0  # forwards and backwards so far
    for action in row:
        if action.receives:
            before[max(0, passed - ahead)].append(action)
        passed += action.computes
    moved: list[Action] = []
    passed = 0
    for action in row:
        if action.computes:
            moved += before[passed]
            passed += 1
        if not action.receives:
            moved.append(action)
    return tuple(moved)
