"""What sites do in particular situations: who is cut off, comes late, comes back, is replaced."""

import pytest

from atoll.control.rounds.gateway import Gateway
from atoll.control.rounds.messages import RoundCommitted
from atoll.simulate.rounds.world import HUBS, RoundRoles, SitesSize, SitesWorld


def started(size: SitesSize, seed: int = 1, roles: RoundRoles | None = None) -> SitesWorld:
    world = SitesWorld(size, seed, roles)
    world.start_all()
    return world


def rounds(world: SitesWorld) -> list[RoundCommitted]:
    return [record for record in world.journal.records if isinstance(record, RoundCommitted)]


def run_rounds(world: SitesWorld, count: int) -> list[RoundCommitted]:
    """So many more."""
    before = len(rounds(world))
    world.run(world.loop.now + 500.0, lambda: len(rounds(world)) >= before + count)
    assert not world.checker.violations
    return rounds(world)[before:]


def cut(world: SitesWorld, site: str) -> None:
    for name in world.names(site):
        for other in [*world.names(), *HUBS]:
            if other not in world.names(site):
                world.network.cut(name, other)
                world.network.cut(other, name)


def join(world: SitesWorld, site: str) -> None:
    for name in world.names(site):
        for other in [*world.names(), *HUBS]:
            if other not in world.names(site):
                world.network.join(name, other)
                world.network.join(other, name)


def test_undisturbed_every_round_names_every_site_by_its_steps_and_tokens() -> None:
    world = started(SitesSize(sites=3, processes=1))
    for record in run_rounds(world, 6):
        assert [offer.update.site for offer in record.named] == ["s0", "s1", "s2"]
        for number, offer in enumerate(record.named):
            assert offer.weight == (offer.last - offer.first) * (1 + number)
    slowest = max(world.step_seconds, key=lambda site: world.step_seconds[site])
    fastest = min(world.step_seconds, key=lambda site: world.step_seconds[site])
    made = {site: sum(o.last - o.first for r in rounds(world) for o in r.named if o.update.site == site) for site in world.sites()}
    assert made[slowest] < made[fastest]  # equal times, not equal steps


@pytest.mark.parametrize(("seconds", "by_state"), [(9.0, False), (80.0, True)])
def test_a_site_that_was_cut_off_catches_up_and_loses_none_of_its_steps(seconds: float, by_state: bool) -> None:
    adopted = []

    class Watched(Gateway):
        async def _adopt(self, position, chunks, named) -> None:  # type: ignore[no-untyped-def]
            await super()._adopt(position, chunks, named)
            adopted.append(self.site)

    world = started(SitesSize(sites=3, processes=1, recent=2), roles=RoundRoles(gateway=Watched))
    run_rounds(world, 2)
    cut(world, "s2")
    world.run(world.loop.now + seconds)
    steps = world.checker.memories["s2"].steps
    alone = [record for record in rounds(world)[3:] if len(record.named) == 2]
    join(world, "s2")
    world.run(world.loop.now + 200.0, lambda: any(o.update.site == "s2" and o.last > steps for r in rounds(world) for o in r.named))
    assert not world.checker.violations
    named = [offer for record in rounds(world) for offer in record.named if offer.update.site == "s2"]
    assert [offer.first for offer in named] == [0, *[offer.last for offer in named[:-1]]]  # every step once
    assert named[-1].last > steps
    assert bool(adopted) == by_state == (len(alone) > 2)


def test_a_state_comes_from_several_sites_at_once() -> None:
    world = started(SitesSize(sites=4, processes=1, late=(60.0,)), seed=3)
    givers = set()
    world.network.watch = lambda source, target, message: givers.add(source) if type(message).__name__ == "GlobalChunk" else None
    world.run(200.0, lambda: any(offer.update.site == "s0" for record in rounds(world) for offer in record.named))
    assert not world.checker.violations
    assert len(givers) > 1


def test_another_process_of_the_site_goes_on_with_what_the_lost_gateway_left() -> None:
    world = started(SitesSize(sites=2, processes=2))
    run_rounds(world, 2)
    leader = world.coordinator()
    assert leader is not None
    gateway = leader.places["s1"].beat.process
    world.kill(gateway)
    later = run_rounds(world, 6)
    assert leader.places["s1"].beat.process != gateway
    named = [offer for record in rounds(world) for offer in record.named if offer.update.site == "s1"]
    assert [offer.first for offer in named] == [0, *[offer.last for offer in named[:-1]]]
    assert len({offer.update.incarnation for offer in named}) == 2
    assert any(len(record.named) == 2 for record in later)


def test_a_round_waits_for_a_silent_site_no_longer_than_the_grace_time_and_goes_on_with_the_quorum() -> None:
    world = started(SitesSize(sites=3, processes=1, quorum=2))
    run_rounds(world, 2)
    world.kill("s2.0")
    assert all(len(record.named) == 2 for record in run_rounds(world, 3)[1:])
    world.kill("s1.0")
    before = len(rounds(world))
    world.run(world.loop.now + 100.0)
    assert len(rounds(world)) <= before + 1  # fewer than the quorum make no round
    world.start("s1.0")
    run_rounds(world, 2)


def test_a_coordinator_that_is_started_again_goes_on_where_the_journal_ends() -> None:
    world = started(SitesSize(sites=2, processes=1))
    run_rounds(world, 3)
    world.kill(HUBS[0])
    world.run(world.loop.now + 20.0)
    world.start(HUBS[0])
    numbers = [record.round for record in [*rounds(world), *run_rounds(world, 3)]]
    assert numbers == list(range(len(numbers)))
    assert world.checker.rollbacks == 0


def test_when_every_site_was_lost_the_newest_state_on_a_disk_is_everybodys() -> None:
    world = started(SitesSize(sites=2, processes=1, save_every=3))
    run_rounds(world, 5)
    world.kill("s0.0")
    world.kill("s1.0")
    world.start("s0.0")
    world.start("s1.0")
    found = run_rounds(world, 2)
    assert world.checker.rollbacks == 1
    assert (found[0].epoch, found[0].round) == (1, 3)


def test_without_faults_sites_may_wait_for_their_rounds() -> None:
    world = started(SitesSize(sites=2, processes=1, waits=True))
    for record in run_rounds(world, 4):
        assert len(record.named) == 2
    for site, memory in world.checker.memories.items():
        last = max(offer.last for record in rounds(world) for offer in record.named if offer.update.site == site)
        assert memory.steps - last <= 1 or memory.offer is None
