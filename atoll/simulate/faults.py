"""Faults: what goes wrong, drawn from a seed as a list that can be replayed, printed and shortened."""

import math
import random
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from itertools import permutations

import msgspec

from atoll.control import Coordinator
from atoll.control.checkpoint_schedule import WITNESSES
from atoll.control.messages import Phase, Reduce, Seal
from atoll.control.multi_stage import process_of, processes
from atoll.simulate import arithmetic
from atoll.simulate.network import LinkFaults
from atoll.simulate.swarm import COORDINATORS, ExactSwarm, SwarmSize

__all__ = ["Fault", "Scenario", "draw_scenario", "schedule"]


class Fault(msgspec.Struct, frozen=True):
    """At a time, something happens to somebody, for so long; with a `phase`, `after` the next time it is reached."""

    at: float
    kind: str
    targets: tuple[str, ...] = ()
    seconds: float = 0.0
    value: float = 0.0
    phase: str = ""
    after: float = 0.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A shape, how the network behaves until all is healed, and the faults."""

    seed: int
    shape: SwarmSize
    heal_at: float
    duplicate: float
    reorder: float
    delay: float
    corrupt: float
    state_seconds: float = 0.0  # by which chunks of states are late at most
    stop_at: float = 0.0  # when the run is asked to end early; 0: never
    faults: tuple[Fault, ...]


KINDS = (
    ("kill", 5), ("kill-stage", 1), ("kill-feeder", 2), ("stop", 4), ("cut", 2), ("cut-one-way", 2), ("isolate", 1),
    ("restart-coordinator", 3), ("take-over", 2), ("stop-coordinator", 1), ("slow-disk", 2), ("slow-worker", 3), ("move", 2), ("leave", 1),
    ("deafen", 2), ("split", 4), ("succeed", 3), ("stall", 3),
)  # fmt: skip
PHASES = {
    "split": ("reduce",),
    "succeed": ("reduce",),
    "stall": ("seal",),
    "take-over": ("reduce", "reduce", ""),
    "restart-coordinator": ("reduce", "reduce", "seal", ""),
}
"""When faults that matter most in some phase strike; others come at any time, half of them in a phase too."""

WINDOW = 55.0
HOSTING = 0.25  # of the seeds
SLOW_STATES = 0.25
REWINDS = 0.02
FORFEITS = 0.1  # of those with staleness
STOPS = 0.05
FORGERIES = 0.1
STOP_BEAT = 0.5  # a wish to stop is seen by whoever coordinates within so many seconds


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    draw = random.Random(seed)
    stages = 2 if draw.random() < 0.8 else 3
    shape = _draw_hosting(
        random.Random(f"hosting {seed}"),  # of its own: a seed without hosting is what it would be if there were none
        SwarmSize(
            stages=stages,
            workers=sum(draw.choice((2, 2, 3)) for _ in range(stages)),
            feeders=draw.choice((1, 1, 2)),
            micro_batches=draw.choice((3, 4, 5)),
            staleness=int(seed % 3 == 2),
            tied=seed % 5 in (3, 4),
            checkpoint_every=0 if seed % 4 == 1 else 2,
            rebalance_seconds=20.0 if seed % 7 == 3 else 0.0,
        ),
    )
    shape, forfeits = _draw_forfeit(random.Random(f"forfeit {seed}"), shape)
    count = draw.choice((1, 2, 3, 4, 5, 6))
    drawn = [_draw_fault(draw, shape) for _ in range(count)]
    state_seconds, joins = _draw_joins(random.Random(f"joins {seed}"), shape)
    rewinds = _draw_rewind(random.Random(f"rewind {seed}"), shape)
    forgeries = _draw_forgeries(random.Random(f"forge {seed}"), shape)
    faults = sorted(drawn + joins + rewinds + forgeries + forfeits, key=lambda fault: fault.at)
    rough = draw.random() < 0.75
    return Scenario(
        seed=seed,
        shape=shape,
        heal_at=WINDOW + 5.0,
        duplicate=0.15 * draw.random() if rough else 0.0,
        reorder=0.3 * draw.random() if rough else 0.0,
        delay=0.04 * draw.random() if rough else 0.0,
        corrupt=0.02 * draw.random() if rough else 0.0,
        state_seconds=state_seconds,
        stop_at=_draw_stop(random.Random(f"stop {seed}")),
        faults=tuple(faults),
    )


def _draw_hosting(draw: random.Random, shape: SwarmSize) -> SwarmSize:
    """In a quarter of the seeds processes host several stages each, some or all of them, and are as many or fewer."""
    if draw.random() >= HOSTING:
        return shape
    workers = draw.randint(2, shape.workers)
    most = draw.randint(2, shape.stages)
    alike = draw.random() < 0.5
    hosting = [most if alike else draw.randint(1, most) for _ in range(workers)]
    hosting[0] = max(hosting[0], shape.stages - sum(hosting[1:]))  # a worker for every stage
    return msgspec.structs.replace(shape, workers=workers, hosting=tuple(hosting))


def _draw_joins(draw: random.Random, shape: SwarmSize) -> tuple[float, list[Fault]]:
    """In a quarter of the seeds states take about as long as a step, so that those who fetch one miss commits and catch up; and many do."""
    if draw.random() >= SLOW_STATES:
        return 0.0, []
    workers = [worker for number in range(shape.workers) for worker in shape.hosted(f"w{number}")]
    moves = [
        Fault(round(draw.uniform(3.0, WINDOW - 10.0), 2), "move", (draw.choice(workers),), value=float(draw.randrange(shape.stages)))
        for _ in range(draw.randint(2, 6))
    ]
    return round(draw.uniform(6.0, 20.0), 2), moves


def _draw_rewind(draw: random.Random, shape: SwarmSize) -> list[Fault]:
    """In a few seeds somebody sleeps through a rollback, which takes most of the time there is."""
    if draw.random() >= REWINDS:
        return []
    return [Fault(3.0, "rewind", (f"w{draw.randrange(shape.workers)}",), round(draw.uniform(8.0, 14.0), 2), draw.random())]


def _draw_forfeit(draw: random.Random, shape: SwarmSize) -> tuple[SwarmSize, list[Fault]]:
    """In some seeds with staleness, and more workers, one loses what it has said to have summed by the commit of the step before."""
    if not shape.staleness or draw.random() >= FORFEITS:
        return shape, []
    larger = msgspec.structs.replace(shape, workers=4 * shape.stages, hosting=())
    return larger, [Fault(round(draw.uniform(3.0, WINDOW / 3), 2), "forfeit", value=draw.random())]


def _draw_stop(draw: random.Random) -> float:
    return round(draw.uniform(3.0, WINDOW), 2) if draw.random() < STOPS else 0.0


def _draw_fault(draw: random.Random, shape: SwarmSize) -> Fault:
    kind = draw.choices([name for name, _ in KINDS], [weight for _, weight in KINDS])[0]
    at = round(3.0 + draw.random() * (WINDOW - 5.0), 2)
    seconds = round(draw.choice((0.5, 3.0, 8.0, 20.0)) * (0.5 + draw.random()), 2)
    workers = [f"w{i}" for i in range(shape.workers)]
    feeders = [f"f{i}" for i in range(shape.feeders)]
    targets: tuple[str, ...] = ()
    value = 0.0
    if kind in ("kill", "stop", "slow-worker", "leave", "deafen", "succeed"):
        targets = (draw.choice(workers),)
        value = draw.choice((3.0, 10.0))
    elif kind == "split":
        targets = tuple(draw.sample(workers, 2))
    elif kind == "kill-stage":
        value = float(draw.randrange(shape.stages))
    elif kind == "kill-feeder":
        targets = (draw.choice(feeders),)
    elif kind in ("cut", "cut-one-way"):
        first, second = draw.sample([*workers, *feeders, COORDINATORS[0]], 2)
        targets = (first, second)
    elif kind == "isolate":
        targets = (draw.choice([*workers, *feeders]),)
    elif kind == "stall":
        value = draw.random()
        seconds = 20.0
    elif kind == "slow-disk":
        value = draw.choice((10.0, 40.0, 100.0))
    elif kind == "move":
        targets = (draw.choice([worker for process in workers for worker in shape.hosted(process)]),)
        value = float(draw.randrange(shape.stages))
    phase = draw.choice(PHASES[kind]) if kind in PHASES else draw.choice(("", "", "seal", "reduce"))
    longest = 0.5 if kind == "stall" else 1.5
    return Fault(at, kind, targets, seconds, value, phase, round(longest * draw.random(), 2))


def _draw_forgeries(draw: random.Random, shape: SwarmSize) -> list[Fault]:
    """In a tenth of the seeds somebody sends states of its own making to the store, again and again."""
    if draw.random() >= FORGERIES:
        return []
    return [Fault(draw.uniform(2.0, WINDOW), "forge", (f"w{draw.randrange(shape.workers)}",)) for _ in range(40)]


def schedule(swarm: ExactSwarm, scenario: Scenario) -> None:
    """Puts all faults, their ends and the healing on the swarm's clock."""
    loop = swarm.loop
    swarm.network.faults = LinkFaults(
        scenario.duplicate, scenario.reorder, scenario.delay, scenario.corrupt, state_seconds=scenario.state_seconds
    )
    for fault in scenario.faults:
        loop.at(fault.at, lambda it: _await_phase(swarm, it, scenario.heal_at), fault)
    if scenario.stop_at:
        loop.at(scenario.stop_at, lambda _: _stop_the_run(swarm))
    loop.at(scenario.heal_at, lambda _: _heal(swarm))


def _stop_the_run(swarm: ExactSwarm) -> None:
    """As a file in the run's directory does: whoever coordinates sees it, also one that is started later."""
    for coordinator in swarm.coordinators.values():
        coordinator.stop()
    swarm.loop.at(swarm.loop.now + STOP_BEAT, lambda _: _stop_the_run(swarm))


def _await_phase(swarm: ExactSwarm, fault: Fault, at_latest: float) -> None:
    """Strikes at once, or when the phase is reached."""
    if not fault.phase:
        _strike(swarm, fault)
        return
    coordinator = swarm.coordinator()
    if coordinator is not None and fault.phase in _phases(coordinator):
        swarm.loop.at(swarm.loop.now + fault.after, lambda it: _strike(swarm, it), fault)
    elif swarm.loop.now + 2.0 < at_latest:
        swarm.loop.at(swarm.loop.now + 0.25, lambda it: _await_phase(swarm, it, at_latest), fault)


def _phases(coordinator: Coordinator) -> set[str]:
    """With staleness a reduction may go on beside the phase of the step under way."""
    return {type(phase).__name__.lower() for phase in (coordinator.phase, coordinator.trailing) if phase is not None}


def _strike(swarm: ExactSwarm, fault: Fault) -> None:
    """The fault begins, and its end is put on the clock."""
    end = swarm.loop.now + fault.seconds
    if fault.kind in ("kill", "kill-feeder"):
        _kill(swarm, fault.targets, end)
    elif fault.kind == "kill-stage":
        _kill(swarm, _serving(swarm, int(fault.value)), end)
    elif fault.kind in ("stop", "stop-coordinator"):
        _stop(swarm, fault.targets[0] if fault.targets else _coordinator_name(swarm), end)
    elif fault.kind in ("cut", "cut-one-way", "isolate", "deafen"):
        _cut(swarm, fault, end)
    elif fault.kind == "split":  # one member falls silent with what it has just got, while another dies
        _cut(swarm, Fault(fault.at, "deafen", fault.targets[:1]), end)
        _kill(swarm, fault.targets[1:], end)
    elif fault.kind == "succeed":  # another coordinator begins while one member, with what it has just got, does not hear of it
        _cut(swarm, Fault(fault.at, "deafen", fault.targets), end + 5.0)
        _kill(swarm, [name for name in (_coordinator_name(swarm),) if name], swarm.loop.now + 0.5)
    elif fault.kind == "forge":
        _forge(swarm, fault.targets[0])
    elif fault.kind == "stall":
        _play(swarm, _stall(swarm, fault.value, end), math.inf)
    elif fault.kind == "rewind":
        _play(swarm, _rewind(swarm, fault.targets[0], fault.value, fault.seconds), WINDOW)
    elif fault.kind == "forfeit":
        _play(swarm, _forfeit(swarm, fault.value), WINDOW)
    elif fault.kind == "restart-coordinator":
        name = _coordinator_name(swarm)
        if name:
            _kill(swarm, [name], end)
    elif fault.kind == "take-over":
        current = _coordinator_name(swarm)
        other = next((name for name in COORDINATORS if name != current and not swarm.alive(name)), None)
        if other is not None:
            swarm.start(other)
    elif fault.kind == "slow-disk":
        _slow_disk(swarm, fault.value, end)
    elif fault.kind == "slow-worker":
        swarm.slow_down(fault.targets[0], fault.value)
        swarm.loop.at(end, lambda _: swarm.slow_down(fault.targets[0], 1.0))
    else:
        _rearrange(swarm, fault)


def _rearrange(swarm: ExactSwarm, fault: Fault) -> None:
    coordinator = swarm.coordinator()
    if fault.kind == "move" and coordinator is not None:
        coordinator.move(fault.targets[0], int(fault.value))
    if fault.kind == "leave":
        for name in swarm.hosted(fault.targets[0]):
            swarm.workers[name].leave()


def _coordinator_name(swarm: ExactSwarm) -> str:
    coordinator = swarm.coordinator()
    return coordinator.node.name if coordinator is not None else ""


def _kill(swarm: ExactSwarm, names: Sequence[str], end: float) -> None:
    for name in names:
        swarm.kill(name)
        swarm.loop.at(end, swarm.start, name)


def _stop(swarm: ExactSwarm, name: str, end: float) -> None:
    if name:
        swarm.stop(name)
        swarm.loop.at(end, swarm.go_on, name)


def _cut(swarm: ExactSwarm, fault: Fault, end: float) -> None:
    if fault.kind in ("isolate", "deafen"):  # from everybody, or from coordinators alone
        others = [name for name in (*(swarm.names() if fault.kind == "isolate" else ()), *COORDINATORS) if name != fault.targets[0]]
        pairs = [pair for other in others for pair in ((fault.targets[0], other), (other, fault.targets[0]))]
    else:
        first, second = fault.targets
        pairs = [(first, second)] if fault.kind == "cut-one-way" else [(first, second), (second, first)]
    for pair in pairs:
        swarm.network.cut(*pair)

    def mend(_: object) -> None:
        for pair in pairs:
            swarm.network.join(*pair)

    swarm.loop.at(end, mend)


def _stall(swarm: ExactSwarm, which: float, end: float) -> Generator[None, None, None]:
    """What was sent in one reduction arrives in a later one: bulk connections inside the largest stage hang, while one that has summed
    something dies in the reduction, comes back with nothing and dies again."""
    rows: dict[int, list[str]] = {}
    for name, worker in sorted(swarm.workers.items()):
        rows.setdefault(worker.stage, []).append(name)
    mates = max(rows.values(), key=len, default=[])
    contributors = sorted(processes(name for name in mates if swarm.workers[name].buffers.manifests()))
    if not contributors:
        return
    victim = contributors[int(which * len(contributors))]
    pairs = list(permutations(sorted(processes(mates) - {victim}), 2))
    for pair in pairs:
        swarm.network.hold(*pair)
    first: Phase | None = None
    while swarm.loop.now < end:
        coordinator = swarm.coordinator()
        phase = (coordinator.trailing or coordinator.phase) if coordinator is not None else None
        if type(phase) is Reduce and first is not None and phase != first:
            break
        if type(phase) is Reduce and first is None:
            first = phase
            _kill(swarm, [victim], swarm.loop.now + 0.5)
            swarm.loop.at(swarm.loop.now + 1.0, lambda _: _kill(swarm, [victim], end))
        yield

    def release(_: object) -> None:
        for pair in pairs:
            swarm.network.release(*pair)

    swarm.loop.at(swarm.loop.now + 0.6, release)  # when members have heard of that reduction


def _forge(swarm: ExactSwarm, process: str) -> None:
    """A wrong state of every stage and about every version. One that was told to store it is outvoted where two others have spoken."""
    coordinator = swarm.coordinator()
    if coordinator is None or not swarm.alive(process):
        return
    storing, wrong = coordinator.checkpoints.round, (arithmetic.ExactState(1, 2, 3, 4),) * arithmetic.CHUNKS
    for version in range(max(1, coordinator.version - 2), coordinator.version + 2):
        for stage in range(swarm.shape.stages):
            if storing.why_not(process, version, stage) is not None or storing.witnessed(stage) == WITNESSES:
                swarm.checkpoint_disk.offer(coordinator, process, (coordinator.epoch, version, stage), wrong)


def _rewind(swarm: ExactSwarm, sleeper: str, which: float, seconds: float) -> Generator[None, None, None]:
    """One sleeps while a stage it does not have is lost, everybody goes back, and the others come to where it was by other sums."""
    try:
        while True:
            coordinator = swarm.coordinator()
            own = {swarm.workers[name].stage for name in swarm.hosted(sleeper)}
            others = sorted({worker.stage for worker in swarm.workers.values()} - own)
            if coordinator is not None and coordinator.version > coordinator.stored_version and own and others:
                break
            yield
        epoch, version = coordinator.epoch, coordinator.version
        swarm.stop(sleeper)
        _kill(swarm, _serving(swarm, others[int(which * len(others))]), swarm.loop.now + seconds)
        while (coordinator := swarm.coordinator()) is None or coordinator.epoch <= epoch or coordinator.version < version:
            yield
    finally:
        swarm.go_on(sleeper)


def _forfeit(swarm: ExactSwarm, which: float) -> Generator[None, None, None]:
    """One gets no sums of a step, works for the next one and says what it has summed of it; then the step is committed without it.

    It fetches the state and freezes once more, while one that stands still is waited for. What it says then does not arrive; what it said
    before is of sums that are lost with its old state.
    """
    while (coordinator := swarm.coordinator()) is None or coordinator.trailing is None:
        yield
    sums = coordinator.trailing.stages
    spare = [sorted({name for name, _ in each.members}.difference(each.owners)) for each in sums[: swarm.shape.stages]]  # by stage
    stage = max(range(swarm.shape.stages), key=lambda stage: (len(spare[stage]), stage))
    if not spare[stage]:
        return
    victim = spare[stage][int(which * len(spare[stage]))]
    mates = [name for name, _ in sums[stage].members if name != victim]
    others = [name for name in swarm.names() if name.startswith("w") and name not in (victim, *mates)]
    with ExitStack() as undone:
        for mate in mates:
            swarm.network.hold(mate, victim)
            undone.callback(swarm.network.release, mate, victim)
        while type(coordinator.phase) is not Seal:
            yield
        slow = min(others, key=lambda name: any(swarm.workers[worker].buffers.manifests() for worker in swarm.hosted(name)))
        swarm.stop(slow)
        undone.callback(swarm.go_on, slow)
        while victim in swarm.workers and swarm.workers[victim].state is not None:
            yield
        for name in COORDINATORS:
            swarm.network.cut(victim, name)
            undone.callback(swarm.network.join, victim, name)
        for mate in mates:
            swarm.network.release(mate, victim)
        while type(coordinator.phase) is Seal and coordinator is swarm.coordinator():
            yield


def _play(swarm: ExactSwarm, script: Generator[None, None, None], until: float) -> None:
    """Goes on with a fault of several acts every quarter of a second; it ends where it stands when time is up."""

    def look(_: object) -> None:
        if swarm.loop.now >= until:
            script.close()
        elif next(script, script) is None:
            swarm.loop.at(swarm.loop.now + 0.25, look)

    look(None)


def _serving(swarm: ExactSwarm, stage: int) -> list[str]:
    """The processes with a worker of a stage."""
    return list(dict.fromkeys(process_of(name) for name, worker in swarm.workers.items() if worker.stage == stage))


def _slow_disk(swarm: ExactSwarm, factor: float, end: float) -> None:
    disks = (swarm.journal_disk, swarm.checkpoint_disk)
    for disk in disks:
        disk.slowness = factor

    def mend(_: object) -> None:
        for disk in disks:
            disk.slowness = 1.0

    swarm.loop.at(end, mend)


def _heal(swarm: ExactSwarm) -> None:
    """No more faults: the network behaves, everybody who was killed or left is started again, everybody stopped goes on."""
    swarm.network.faults = None
    for disk in (swarm.journal_disk, swarm.checkpoint_disk):
        disk.slowness = 1.0
    swarm.network.release_all()
    for name in swarm.names():
        swarm.slow_down(name, 1.0)
        if any(swarm.workers[worker].finished for worker in swarm.hosted(name)):
            swarm.kill(name)
        swarm.go_on(name)
        swarm.start(name)
    for name in COORDINATORS:
        swarm.go_on(name)
    if swarm.coordinator() is None:
        swarm.kill(COORDINATORS[0])
        swarm.start(COORDINATORS[0])
