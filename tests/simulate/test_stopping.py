"""A run that is asked to end, or must, ends with the state of its last commit stored, whoever dies, moves or comes back meanwhile."""

import random
from typing import Any

import msgspec
import pytest

from atoll.control.checkpoint_schedule import CheckpointRound
from atoll.control.coordinator import Coordinator
from atoll.control.journal import replay
from atoll.control.membership import Member, Members, StageMoves
from atoll.control.messages import WorkerBeat
from atoll.simulate.arithmetic import reference
from atoll.simulate.faults import draw_scenario
from atoll.simulate.fuzz import run_scenario
from atoll.simulate.swarm import COORDINATORS, ExactSwarm, SwarmSize, exact_settings


def started(shape: SwarmSize, seed: int = 1, **changed: Any) -> tuple[ExactSwarm, Coordinator]:
    swarm = ExactSwarm(shape, seed, settings=msgspec.structs.replace(exact_settings(shape), **changed))
    swarm.start_all()
    swarm.run_to_version(3)
    coordinator = swarm.coordinator()
    assert coordinator is not None
    return swarm, coordinator


def stops(swarm: ExactSwarm, seconds: float = 600.0) -> None:
    swarm.run(swarm.loop.now + seconds, swarm.ended)
    assert swarm.ended()
    assert swarm.checker.violations == []
    assert replay(swarm.journal_disk.records).stored


def test_some_seeds_are_stopped_among_their_faults() -> None:
    stopped = [scenario for scenario in map(draw_scenario, range(1000)) if scenario.stop_at]
    assert 30 <= len(stopped) <= 80
    assert [run_scenario(scenario).violations for scenario in stopped if run_scenario(scenario).violations] == []


@pytest.mark.parametrize("seed", range(1, 31))
def test_what_a_worker_stored_of_the_stage_it_left_does_not_count_for_the_one_it_has(seed: int) -> None:
    """A stage's first worker is silent when the run is stopped; the other stage's only one dies, and the writer takes its place."""
    swarm, coordinator = started(SwarmSize(stages=2, workers=3, micro_batches=4), seed, checkpoint_every=2)
    rows: list[list[str]] = [[], []]
    for member in coordinator.members:
        if member.worker:
            rows[member.stage].append(member.name)
    several, single = sorted(rows, key=len, reverse=True)
    swarm.stop(several[0])
    swarm.run(swarm.loop.now + 8.0)
    coordinator.stop()
    swarm.run(swarm.loop.now + 300.0, lambda: coordinator.checkpoints.round.version == coordinator.version and coordinator.stopping)
    swarm.kill(single[0])
    swarm.go_on(several[0])
    swarm.run(swarm.loop.now + 120.0, swarm.ended)
    swarm.start(single[0])
    stops(swarm)


def test_a_writer_that_is_on_another_stage_by_now_is_replaced() -> None:
    """It was killed and came back under its name while the run was stopping: nobody else would ever store its old stage."""
    first, second, third = (Member(name, True, number, 1, min(number, 1), 0.0) for number, name in enumerate("abc"))
    storing = CheckpointRound()
    storing.begin(5, [first, second, third], 0.0)
    second.stage = 0
    storing.replace_lost([first, second, third])
    assert [storing.writes(member) for member in (first, second, third)] == [True, False, True]


def test_one_that_was_replaced_does_not_end_the_run() -> None:
    """It has not heard that another coordinates, and is asked to stop: ending would write nothing that the journal could refuse."""
    swarm, coordinator = started(SwarmSize(stages=2, workers=4), checkpoint_every=1)
    swarm.run(swarm.loop.now + 100.0, lambda: coordinator.stored_version == coordinator.version)
    for name in swarm.names():
        swarm.network.cut(name, COORDINATORS[0])
        swarm.network.cut(COORDINATORS[0], name)
    swarm.start(COORDINATORS[1])
    swarm.run(swarm.loop.now + 1.0)
    assert not coordinator.deposed
    coordinator.stop()
    swarm.run(swarm.loop.now + 30.0, lambda: coordinator.finished)
    assert coordinator.deposed
    assert swarm.coordinator() is swarm.coordinators[COORDINATORS[1]]


def test_a_stage_without_anybody_is_filled_though_the_others_are_at_their_minimum() -> None:
    swarm, _ = started(SwarmSize(stages=2, workers=4), minimum_replicas=2)
    for name in [name for name, worker in swarm.workers.items() if worker.stage == 0]:
        swarm.kill(name)
    version = swarm.checker.commits
    swarm.run(swarm.loop.now + 300.0, lambda: swarm.checker.commits >= version + 2)
    assert swarm.checker.commits >= version + 2
    assert swarm.checker.violations == []


def test_whoever_is_meant_for_a_stage_may_start_late() -> None:
    """Nobody is sent to a stage that has nobody before it has had nobody for a while."""
    settings, happened = exact_settings(SwarmSize()), []
    members, rearranging = Members(settings, 1), StageMoves(settings, random.Random(0), happened.append)

    def beats(now: float) -> None:
        for name in "ab":
            members.hear(WorkerBeat(name, 0, 1, -1, -1, -1, 0, 0, -1, 0.0, None, "", None, planned=1), now)

    for now in (0.0, settings.lost_seconds - 0.1):
        beats(now)
        assert rearranging.fill_empty_stages(members, now) == []
    beats(settings.lost_seconds)
    assert [member.stage for member in rearranging.fill_empty_stages(members, settings.lost_seconds)] == [0]
    assert len(happened) == 1


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("killed", [False, True])
def test_a_gradient_that_is_not_finite_ends_the_run_with_the_state_before_it(staleness: int, killed: bool) -> None:
    """As one process does where it is not fp16; whoever coordinates next comes to the same end."""
    shape = SwarmSize(stages=2, workers=4, micro_batches=4, staleness=staleness)
    settings = msgspec.structs.replace(exact_settings(shape), skips_overflows=False)
    undisturbed = reference(shape.stages, shape.micro_batches, staleness)
    last = next(version for version in range(1000) if undisturbed.commit(version)[1])
    swarm = ExactSwarm(shape, 3, settings=settings)
    swarm.start_all()
    if killed:
        swarm.run(1e5, lambda: any(c.refused is not None for c in swarm.coordinators.values()))
        swarm.kill(COORDINATORS[0])
        swarm.start(COORDINATORS[0])
    stops(swarm, 1e5)
    coordinator = swarm.coordinators[COORDINATORS[0]]
    assert coordinator.version == last
    assert coordinator.refused is not None
    assert (coordinator.refused.step, coordinator.refused.what, coordinator.refused.value) == (last + 1, "gradient", "inf")
    assert all(worker.version == last for worker in swarm.workers.values() if worker.state is not None)
