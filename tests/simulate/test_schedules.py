"""Schedules that broke earlier versions of the protocol, with a whole swarm."""

import pytest

from atoll.control import Settings
from atoll.control.journal import Epoch, Term
from atoll.control.messages import Committed, Reduce, Run, Seal, StateChunk
from atoll.events import StepFinished
from atoll.simulate.swarm import COORDINATORS, ExactSwarm, SwarmSize
from tests.simulate.faulty import without


def commits(swarm: ExactSwarm) -> list[Committed]:
    return [record for record in swarm.journal_disk.records if isinstance(record, Committed)]


def until(swarm: ExactSwarm, phase: type, version: int, limit: float = 300.0) -> None:
    """Runs on until the coordinator is in a phase of a step."""

    def reached() -> bool:
        coordinator = swarm.coordinator()
        return coordinator is not None and type(coordinator.phase) is phase and coordinator.version == version

    swarm.run(limit, reached)
    assert reached()


def goes_on(swarm: ExactSwarm, more: int = 2, limit: float = 400.0) -> None:
    """So many commits follow, and nothing is wrong."""
    enough = len(commits(swarm)) + more
    swarm.run(swarm.loop.now + limit, lambda: len(commits(swarm)) >= enough)
    assert not swarm.checker.violations
    assert len(commits(swarm)) >= enough
    swarm.checker.at_the_end()
    assert not swarm.checker.violations


def started(shape: SwarmSize, *lacking: str, seed: int = 1, settings: Settings | None = None) -> ExactSwarm:
    swarm = ExactSwarm(shape, seed, roles=without(*lacking), settings=settings)
    swarm.start_all()
    return swarm


def test_an_undisturbed_swarm_trains() -> None:
    swarm = started(SwarmSize())
    goes_on(swarm, 6)
    assert [record.version for record in commits(swarm)] == list(range(6))


@pytest.mark.parametrize("broken", [False, True])
def test_a_contributor_that_restarts_fast_under_its_name_is_somebody_new(broken: bool) -> None:
    """It answers SEAL, dies, comes back empty and answers again, while the coordinator still waits for another."""
    swarm = started(SwarmSize(stages=2, workers=4, micro_batches=4), *(["incarnation"] if broken else []))
    until(swarm, Seal, 0)
    swarm.run(swarm.loop.now + 30.0, lambda: any(w.buffers.manifests() for w in swarm.workers.values()))
    until(swarm, Seal, 0)
    first = [name for name, worker in swarm.workers.items() if worker.stage == 0]
    swarm.stop(next(name for name, worker in swarm.workers.items() if worker.stage == 1))
    coordinator = swarm.coordinator()
    assert coordinator is not None
    swarm.run(swarm.loop.now + 2.0, lambda: first[0] in coordinator._manifests)
    swarm.kill(first[0])
    swarm.start(first[0])
    swarm.run(swarm.loop.now + 3.0, lambda: swarm.workers[first[0]].frozen is not None)
    for name in swarm.names():
        swarm.go_on(name)
    if broken:
        swarm.run(swarm.loop.now + 100.0, lambda: len(commits(swarm)) >= 1)
        assert swarm.checker.violations
    else:
        goes_on(swarm)


def test_a_contributor_that_dies_in_the_reduction_is_replaced() -> None:
    for name in ("w0", "w3"):
        swarm = started(SwarmSize())
        until(swarm, Reduce, 1)
        swarm.kill(name)
        swarm.loop.at(swarm.loop.now + 1.0, swarm.start, name)
        goes_on(swarm)


def test_what_a_dead_worker_had_summed_is_redone_while_the_step_still_runs() -> None:
    """The coordinator names the lost; feeders do not wait for a SEAL to show what is missing. One round is enough."""
    shape = SwarmSize(stages=2, workers=6, micro_batches=30)
    steps: list[StepFinished] = []
    swarm = ExactSwarm(shape, 1, observe=lambda it: steps.append(it) if isinstance(it, StepFinished) else None)
    swarm.start_all()
    goes_on(swarm, 1)
    until(swarm, Run, 1)
    swarm.run(swarm.loop.now + 60.0, lambda: bool(swarm.workers["w0"].buffers.manifests()))
    swarm.kill("w0")
    swarm.run(swarm.loop.now + 300.0, lambda: len(steps) == 2)
    assert not swarm.checker.violations
    assert steps[1].rounds == 1


def test_whoever_falls_silent_for_a_while_still_contributes() -> None:
    """Its work is redone in the small buffers of others; once it is heard again, its own large one is taken."""
    shape = SwarmSize(stages=2, workers=6, micro_batches=30)
    swarm = started(shape)
    goes_on(swarm, 1)
    until(swarm, Run, 1)
    swarm.run(swarm.loop.now + 60.0, lambda: bool(swarm.workers["w0"].buffers.manifests()))
    swarm.stop("w0")
    swarm.loop.at(swarm.loop.now + 9.0, swarm.go_on, "w0")
    goes_on(swarm, 2)


def overlapping(swarm: ExactSwarm, version: int, limit: float = 300.0) -> None:
    """Runs on until a step is under way while the one before it, of this version, is summed."""

    def reached() -> bool:
        coordinator = swarm.coordinator()
        return coordinator is not None and coordinator.trailing is not None and coordinator.version == version

    swarm.run(limit, reached)
    assert reached()


STALE = SwarmSize(staleness=1)


def test_with_staleness_the_next_step_runs_while_sums_are_made() -> None:
    fresh, stale = started(SwarmSize()), started(STALE)
    goes_on(fresh, 20)
    goes_on(stale, 20)
    assert stale.loop.now < 0.95 * fresh.loop.now  # virtual time: it is the same on every machine


@pytest.mark.parametrize("after", [0.0, 0.3, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("name", ["w0", "w3"])
def test_with_staleness_a_contributor_that_dies_in_the_reduction_is_replaced(name: str, after: float) -> None:
    """The step is taken up again with the sums that are left, while the next one had already begun."""
    swarm = started(STALE)
    overlapping(swarm, 1)
    swarm.run(swarm.loop.now + after)
    swarm.kill(name)
    swarm.loop.at(swarm.loop.now + 1.0, swarm.start, name)
    goes_on(swarm, 3)


@pytest.mark.parametrize("after", [0.0, 0.3, 0.6, 1.0, 2.0])
def test_with_staleness_another_coordinator_takes_over_in_the_middle(after: float) -> None:
    swarm = started(STALE)
    overlapping(swarm, 1)
    swarm.run(swarm.loop.now + after)
    swarm.kill(COORDINATORS[0])
    swarm.loop.at(swarm.loop.now + 1.0, swarm.start, COORDINATORS[1])
    goes_on(swarm, 3)


def test_with_staleness_a_lost_stage_begins_again_with_both_weights() -> None:
    """The checkpoint has the weights before its last step too: the steps after it are those of the undisturbed run."""
    swarm = started(STALE)
    goes_on(swarm, 5)
    overlapping(swarm, 5)
    for name in [name for name, worker in swarm.workers.items() if worker.stage == 1]:
        swarm.kill(name)
        swarm.loop.at(swarm.loop.now + 20.0, swarm.start, name)
    goes_on(swarm, 3)
    assert swarm.checker.rollbacks == 1


@pytest.mark.parametrize("broken", [False, True])
def test_with_staleness_sums_of_one_who_cannot_apply_the_commit_are_gone(broken: bool) -> None:
    """It never gets the sum of step 1, but works for step 2 and says what it has summed; then step 1 is committed without it.

    It fetches the state and hears once more that it is to freeze, but what it says then is lost, while another is still waited for.
    """
    swarm = started(SwarmSize(stages=2, workers=10, micro_batches=4, staleness=1), *(["survived"] if broken else []))
    overlapping(swarm, 1)
    mates = [name for name, worker in swarm.workers.items() if worker.stage == 0]
    for mate in mates[1:]:
        swarm.network.hold(mate, mates[0])
    coordinator = swarm.coordinator()
    assert coordinator is not None
    swarm.run(swarm.loop.now + 300.0, lambda: type(coordinator.phase) is Seal)
    slow = next(name for name, worker in swarm.workers.items() if worker.stage == 1 and not worker.buffers.manifests())
    swarm.stop(slow)
    swarm.run(swarm.loop.now + 300.0, lambda: mates[0] in coordinator._manifests)
    assert coordinator.trailing is not None
    assert swarm.workers[mates[0]].buffers.manifests()
    swarm.run(swarm.loop.now + 300.0, lambda: swarm.workers[mates[0]].state is None)
    assert (coordinator.version, type(coordinator.phase)) == (2, Seal)
    swarm.network.cut(mates[0], COORDINATORS[0])
    swarm.network.release_all()
    swarm.run(swarm.loop.now + 60.0, lambda: type(coordinator.phase) is not Seal)
    swarm.go_on(slow)
    swarm.network.join(mates[0], COORDINATORS[0])
    if broken:
        swarm.run(swarm.loop.now + 100.0, lambda: len(commits(swarm)) >= 3)
        assert swarm.checker.violations
    else:
        goes_on(swarm)


def test_with_staleness_who_leaves_or_moves_does_so_between_steps() -> None:
    swarm = started(STALE)
    overlapping(swarm, 1)
    coordinator = swarm.coordinator()
    assert coordinator is not None
    mover = next(name for name, worker in swarm.workers.items() if worker.stage == 0)
    leaver = next(name for name, worker in swarm.workers.items() if worker.stage == 1)
    coordinator.move(mover, 1)
    swarm.workers[leaver].leave()
    goes_on(swarm, 4)
    assert swarm.workers[mover].stage == 1
    assert swarm.workers[leaver].finished


@pytest.mark.parametrize("broken", [False, True])
def test_a_coordinator_that_was_replaced_cannot_commit(broken: bool) -> None:
    """Its record is on the way to a slow disk while another takes over."""
    swarm = started(SwarmSize(), *(["journal-fence"] if broken else []))
    until(swarm, Reduce, 1)
    swarm.journal_disk.slowness = 60.0
    swarm.run(swarm.loop.now + 4.0)
    swarm.journal_disk.slowness = 1.0
    swarm.start(COORDINATORS[1])
    if broken:
        swarm.run(swarm.loop.now + 60.0)
        assert swarm.checker.violations
    else:
        goes_on(swarm)
        assert swarm.coordinators[COORDINATORS[0]].deposed
        assert sum(isinstance(record, Term) for record in swarm.journal_disk.records) == 2


@pytest.mark.parametrize("broken", [False, True])
def test_nobody_hears_of_a_commit_before_it_is_durable(broken: bool) -> None:
    swarm = started(SwarmSize(), *(["journal-first"] if broken else []))
    until(swarm, Reduce, 1)
    swarm.journal_disk.slowness = 200.0
    swarm.run(swarm.loop.now + 8.0)
    assert len(commits(swarm)) == 1
    if broken:
        assert swarm.checker.violations
    else:
        assert {worker.version for worker in swarm.workers.values()} == {1}
        swarm.kill(COORDINATORS[0])
        swarm.journal_disk.slowness = 1.0
        swarm.start(COORDINATORS[0])
        goes_on(swarm)


def test_a_new_coordinator_uses_the_buffers_that_survived() -> None:
    swarm = started(SwarmSize(micro_batches=6))
    until(swarm, Reduce, 2)
    swarm.kill(COORDINATORS[0])
    done = {name: sum(len(b.micro_batches) for b in worker.buffers.manifests()) for name, worker in swarm.workers.items()}
    assert sum(done.values()) == 12
    swarm.start(COORDINATORS[0])
    began = swarm.loop.now
    swarm.run(began + 60.0, lambda: len(commits(swarm)) == 3)
    assert commits(swarm)[-1].round == (2, 1)  # the first seal was enough
    goes_on(swarm)


@pytest.mark.parametrize("broken", [False, True])
def test_a_worker_that_slept_through_a_rollback_brings_no_old_state(broken: bool) -> None:
    """Cut off at version 3 of epoch 0, it hears again when epoch 1 is at version 3 too, reached by other sums."""
    swarm = started(SwarmSize(stages=2, workers=6), *(["epoch"] if broken else []), seed=5)
    goes_on(swarm, 3)
    until(swarm, Reduce, 3)
    sleeper = next(name for name, worker in sorted(swarm.workers.items()) if worker.stage == 1)
    swarm.network.cut(COORDINATORS[0], sleeper)
    for name in [name for name, worker in swarm.workers.items() if worker.stage == 0]:
        swarm.kill(name)
        swarm.loop.at(swarm.loop.now + 15.0, swarm.start, name)

    def again() -> bool:
        records = swarm.journal_disk.records
        last = records[-1]
        return isinstance(last, Committed) and last.epoch == 1 and last.version == 2 and any(isinstance(r, Epoch) for r in records)

    swarm.run(swarm.loop.now + 300.0, again)
    assert again()
    swarm.network.join(COORDINATORS[0], sleeper)
    if broken:
        swarm.run(swarm.loop.now + 60.0)
        swarm.checker.at_the_end()
        assert swarm.checker.violations
    else:
        goes_on(swarm)


def test_a_permanent_cut_between_two_of_a_stage_does_not_stop_it() -> None:
    swarm = started(SwarmSize(stages=2, workers=6))
    goes_on(swarm, 1)
    mates = [name for name, worker in swarm.workers.items() if worker.stage == 0][:2]
    swarm.network.cut(*mates)
    swarm.network.cut(*reversed(mates))
    goes_on(swarm, 3)


def test_one_way_cuts_keep_work_away_from_those_who_do_not_hear() -> None:
    swarm = started(SwarmSize(stages=2, workers=6))
    goes_on(swarm, 1)
    swarm.network.cut(COORDINATORS[0], "w0")
    goes_on(swarm, 3)
    coordinator = swarm.coordinator()
    assert coordinator is not None
    assert all(peer.worker != "w0" for row in coordinator.routes for peer in row)


def test_a_joiner_whose_transfer_is_slower_than_a_step_joins() -> None:
    swarm = started(SwarmSize(stages=2, workers=4))
    goes_on(swarm, 2)
    slow = swarm.network
    slow._sizes, slow._bytes_per_s = {StateChunk: 6.0}, 1.0  # two chunks from one donor take longer than a step
    swarm.kill("w0")
    swarm.start("w0")
    swarm.run(swarm.loop.now + 200.0, lambda: swarm.workers["w0"].state is not None and len(commits(swarm)) > 4)
    assert swarm.workers["w0"].state is not None
    goes_on(swarm)


def test_a_lone_slow_worker_finishes() -> None:
    swarm = started(SwarmSize(stages=2, workers=2, micro_batches=4))
    goes_on(swarm, 1)
    swarm.slow_down("w0", 15.0)
    goes_on(swarm, 2, limit=2000.0)


def test_a_lost_stage_comes_back_from_the_checkpoint() -> None:
    swarm = started(SwarmSize(stages=3, workers=7))
    goes_on(swarm, 3)
    for name in [name for name, worker in swarm.workers.items() if worker.stage == 1]:
        swarm.kill(name)
        swarm.loop.at(swarm.loop.now + 5.0, swarm.start, name)
    goes_on(swarm, 3)
    epochs = [record for record in swarm.journal_disk.records if isinstance(record, Epoch)]
    assert [(record.epoch, record.version) for record in epochs] == [(0, 0), (1, 2)]


def test_a_feeder_may_die_at_any_time() -> None:
    swarm = started(SwarmSize(feeders=2))
    goes_on(swarm, 1)
    swarm.kill("f0")
    goes_on(swarm, 1)
    swarm.start("f0")
    swarm.kill("f1")
    goes_on(swarm, 2)


def test_leaving_politely_costs_nothing_that_was_done_and_never_empties_a_stage() -> None:
    swarm = started(SwarmSize(stages=2, workers=3))
    goes_on(swarm, 1)
    for worker in list(swarm.workers.values()):
        worker.leave()
    goes_on(swarm, 2)
    assert {worker.stage for worker in swarm.workers.values() if not worker.finished} == {0, 1}


def test_a_wished_move_is_made_between_steps() -> None:
    swarm = started(SwarmSize(stages=2, workers=5))
    goes_on(swarm, 1)
    coordinator = swarm.coordinator()
    assert coordinator is not None
    mover = next(name for name, worker in swarm.workers.items() if worker.stage == 0)
    coordinator.move(mover, 1)
    goes_on(swarm, 3)
    assert swarm.workers[mover].stage == 1
