"""A swarm that nobody told how often to save loses little when a stage loses all its workers, and makes up for a lost worker at once."""

from atoll.control import Settings
from atoll.events import AnyEvent, MemberMoved
from atoll.simulate.peers import PeerModel, PeerSwarm

MODEL = PeerModel(
    forward_seconds=0.06, backward_seconds=0.14, state_bytes=2e8, gradient_bytes=2e7, bytes_per_s=1.25e9, latency_seconds=0.005
)


def swarm_of(peers: int, micro_batches: int = 100) -> PeerSwarm:
    swarm = PeerSwarm(Settings(stages=2, micro_batches=micro_batches, steps=10**9, chunks=4), MODEL)
    for number in range(peers):
        swarm.start(f"p{number}")
    return swarm


def on_stage(swarm: PeerSwarm, stage: int) -> list[str]:
    return [name for name, worker in swarm.workers.items() if worker.stage == stage]


def version(swarm: PeerSwarm) -> int:
    return swarm.coordinator.version


def test_a_stage_that_loses_all_its_workers_at_once_costs_little_by_default() -> None:
    swarm = swarm_of(4)
    swarm.loop.run(1e5, lambda: version(swarm) >= 40)
    for name in on_stage(swarm, 1):
        swarm.kill(name)
    before = version(swarm)
    swarm.start("p4")
    swarm.start("p5")
    swarm.loop.run(swarm.loop.now + 1000.0, lambda: version(swarm) > before)
    assert version(swarm) > before
    (lost,) = swarm.rollbacks
    assert 0 < lost.step <= before
    assert lost.lost == before - lost.step <= 20


def test_a_young_run_loses_at_most_half_of_what_it_has_made() -> None:
    swarm = swarm_of(4)
    swarm.loop.run(1e5, lambda: version(swarm) >= 5)
    for name in on_stage(swarm, 0):
        swarm.kill(name)
    swarm.loop.run(swarm.loop.now + 1000.0, lambda: bool(swarm.rollbacks))
    assert swarm.rollbacks[0].step >= 2


def test_a_stage_down_to_its_last_process_is_stored_in_the_middle_of_the_step() -> None:
    swarm = swarm_of(4, micro_batches=2000)  # a step takes minutes
    swarm.loop.run(1e5, lambda: version(swarm) >= 1)
    swarm.loop.run(swarm.loop.now + 60.0)
    swarm.loop.run(1e5, lambda: version(swarm) >= 2)
    stored = len(swarm.saves)
    swarm.loop.run(swarm.loop.now + 60.0)
    first, second = on_stage(swarm, 1)
    swarm.kill(first)
    swarm.loop.run(swarm.loop.now + 30.0)
    assert version(swarm) == 2
    assert swarm.saves[-1].step == 2
    assert len(swarm.saves) >= stored
    swarm.kill(second)
    swarm.start("p4")
    swarm.loop.run(swarm.loop.now + 60.0, lambda: bool(swarm.rollbacks))
    assert [lost.lost for lost in swarm.rollbacks] == [0]


def test_one_that_comes_as_another_dies_takes_its_place_within_the_step() -> None:
    """It is placed before the silence is noticed, so on some other stage."""
    heard: list[AnyEvent] = []
    swarm = PeerSwarm(Settings(stages=2, micro_batches=1000, steps=10**9, chunks=4), MODEL, heard.append)
    for number in range(4):
        swarm.start(f"p{number}")
    swarm.loop.run(1e5, lambda: version(swarm) >= 1)
    swarm.loop.run(swarm.loop.now + 10.0)
    swarm.kill(on_stage(swarm, 1)[0])
    swarm.start("p9")
    swarm.loop.run(swarm.loop.now + 10.0)
    assert [(event.name, event.target) for event in heard if isinstance(event, MemberMoved)] == [("p9", 1)]
    assert version(swarm) == 1
