"""Processes that host several stages, with a whole swarm on the virtual clock."""

import pytest

from atoll.control import Settings
from atoll.control.messages import Backward, Forward, Reduce, Run, SumPart
from atoll.control.multi_stage import process_of, processes
from atoll.simulate.faults import draw_scenario
from atoll.simulate.fuzz import run_scenario
from atoll.simulate.peers import PeerModel, PeerSwarm
from atoll.simulate.swarm import COORDINATORS, ExactSwarm, SwarmSize

from .test_schedules import goes_on, started, until

BOTH = SwarmSize(stages=2, workers=2, micro_batches=4, hosting=(2, 2))


def stages_of(swarm: ExactSwarm) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, worker in sorted(swarm.workers.items()):
        found.setdefault(process_of(name), []).append(worker.stage)
    return {name: sorted(row) for name, row in found.items()}


def test_two_processes_that_host_both_stages_train() -> None:
    swarm = started(BOTH)
    goes_on(swarm, 4)
    assert stages_of(swarm) == {"w0": [0, 1], "w1": [0, 1]}


def test_fewer_processes_than_stages_train() -> None:
    swarm = started(SwarmSize(stages=3, workers=2, micro_batches=4, hosting=(2, 1)))
    goes_on(swarm, 3)
    assert sorted(stage for row in stages_of(swarm).values() for stage in row) == [0, 1, 2]


def test_activations_stay_inside_processes() -> None:
    """What passes between stages leaves a process only where shares would suffer."""
    shape = SwarmSize(stages=2, workers=2, micro_batches=30, hosting=(2, 2))
    swarm = started(shape)
    crossing: list[object] = []

    def watch(source: str, target: str, message: object) -> None:
        if isinstance(message, Forward | Backward) and not source.startswith("f"):
            crossing.append(message)

    swarm.network.watch = watch
    goes_on(swarm, 2)
    assert len(crossing) <= 0.15 * 2 * 2 * 30


@pytest.mark.parametrize("phase", [Run, Reduce])
def test_a_process_that_dies_takes_all_its_workers_and_nothing_else(phase: type) -> None:
    swarm = started(BOTH)
    until(swarm, phase, 1)
    swarm.kill("w0")
    assert set(swarm.workers) == {"w1", "w1+1"}
    goes_on(swarm, 2)
    swarm.start("w0")
    goes_on(swarm, 2)
    assert stages_of(swarm) == {"w0": [0, 1], "w1": [0, 1]}


def test_a_stopped_and_cut_off_process_comes_back() -> None:
    swarm = started(BOTH)
    until(swarm, Run, 1)
    swarm.stop("w1")
    goes_on(swarm, 1)
    swarm.go_on("w1")
    for pair in (("w1", COORDINATORS[0]), (COORDINATORS[0], "w1")):
        swarm.network.cut(*pair)
    goes_on(swarm, 1)
    for pair in (("w1", COORDINATORS[0]), (COORDINATORS[0], "w1")):
        swarm.network.join(*pair)
    goes_on(swarm, 2)


def test_whoever_leaves_is_let_go_where_another_process_stays() -> None:
    swarm = started(BOTH)
    goes_on(swarm, 1)
    for name in swarm.hosted("w0"):
        swarm.workers[name].leave()
    goes_on(swarm, 2)
    assert all(swarm.workers[name].finished for name in swarm.hosted("w0"))
    for name in swarm.hosted("w1"):
        swarm.workers[name].leave()
    goes_on(swarm, 2)  # the last of both stages stays
    assert not any(swarm.workers[name].finished for name in swarm.hosted("w1"))


def test_a_worker_is_not_moved_to_where_its_process_is() -> None:
    swarm = started(SwarmSize(stages=2, workers=3, micro_batches=4, hosting=(2, 2, 1)))
    goes_on(swarm, 1)
    coordinator = swarm.coordinator()
    assert coordinator is not None
    coordinator.move("w0", 1)
    goes_on(swarm, 2)
    assert stages_of(swarm)["w0"] == [0, 1]


def test_a_quarter_of_the_seeds_host_and_replay_exactly() -> None:
    hosting = [seed for seed in range(200) if draw_scenario(seed).shape.hosting]
    assert 30 <= len(hosting) <= 70
    assert any(len(draw_scenario(seed).shape.hosting) < draw_scenario(seed).shape.stages for seed in hosting)
    scenario = draw_scenario(hosting[0])
    assert scenario == draw_scenario(hosting[0])
    assert run_scenario(scenario) == run_scenario(scenario)


def modelled(stages: int, processes: list[tuple[int, float]], steps: int) -> PeerSwarm:
    settings = Settings(
        stages=stages, micro_batches=60, steps=steps, heartbeat_seconds=1.0, rebalance_seconds=30.0, migration_seconds=2.0, in_flight=500
    )
    swarm = PeerSwarm(settings, PeerModel(forward_seconds=0.1, backward_seconds=0.25))
    for number, (count, slowness) in enumerate(processes):
        swarm.start(f"p{number}", slowness, count)
    return swarm


def test_workers_that_share_a_device_are_not_rated_at_its_speed_each() -> None:
    """A process alone computes 1 / 0.35 micro-batches of one stage a second, and half of that when it hosts two."""
    swarm = modelled(2, [(2, 1.0), (2, 1.0)], 8)
    swarm.loop.run(2000.0, lambda: len(swarm.committed) == 8)
    assert len(swarm.committed) == 8
    for stage in swarm.coordinator.members.capacities(swarm.loop.now):
        assert stage == pytest.approx(3.5 / 0.35, rel=0.3)  # in forwards: two halves


def test_a_reduction_over_slow_links_is_not_asked_for_again_and_again() -> None:
    """Chunks take longer than heart-beats; each part travels once but for a few before that is known."""
    settings = Settings(stages=2, micro_batches=20, steps=3, chunks=19, heartbeat_seconds=0.5, patience_seconds=10.0)
    model = PeerModel(forward_seconds=0.06, backward_seconds=0.14, gradient_bytes=79e6, bytes_per_s=2.5e7, shared_links=True)
    swarm = PeerSwarm(settings, model)
    parts: list[SumPart] = []
    swarm.network.watch = lambda source, target, message: parts.append(message) if isinstance(message, SumPart) else None
    for number in range(8):
        swarm.start(f"p{number}")
    swarm.loop.run(400.0, lambda: len(swarm.committed) == 3)
    assert len(swarm.committed) == 3
    assert len(parts) <= 1.1 * 3 * 2 * 19 * 4


def test_rebalancing_settles_where_processes_host_several_stages() -> None:
    swarm = modelled(3, [(3, 1.0), (2, 1.0), (2, 2.0), (1, 1.0), (1, 0.5)], 40)
    swarm.loop.run(20_000.0, lambda: len(swarm.committed) == 40)
    assert len(swarm.committed) == 40
    half = swarm.committed[20].at_seconds
    assert [move for move in swarm.moves if move.at_seconds > half] == []
    assert len(swarm.moves) <= 4
    for stage in range(3):
        row = [name for name, worker in swarm.workers.items() if worker.stage == stage]
        assert len(processes(row)) == len(row) >= 1
