"""What goes wrong with sites that train together, drawn from a seed as a list that can be replayed, printed and shortened."""

import random
from collections.abc import Sequence
from itertools import product

import msgspec

from atoll.simulate.network import LinkFaults
from atoll.simulate.rounds.world import HUBS, SitesSize, SitesWorld

__all__ = ["RoundFault", "RoundScenario", "draw_round_scenario", "schedule_round_faults"]

WINDOW = 36.0
HEAL_AT = 38.0
SUPERVISED_EVERY = 10.0
KINDS = (
    ("kill", 5), ("kill-site", 3), ("wipe-site", 1), ("stop", 3), ("stop-site", 2), ("cut", 3), ("cut-one-way", 3), ("isolate-site", 3),
    ("deafen", 3), ("restart-coordinator", 4), ("take-over", 3), ("stop-coordinator", 2), ("slow-disk", 2), ("slow-site", 3),
    ("kill-all", 1),
)  # fmt: skip


class RoundFault(msgspec.Struct, frozen=True):
    """At a time, something happens to somebody, for so long; with `named`, as soon as a round's updates are named, and `after` that."""

    at: float
    kind: str
    targets: tuple[str, ...] = ()
    seconds: float = 0.0
    named: bool = False
    after: float = 0.0


class RoundScenario(msgspec.Struct, frozen=True, kw_only=True):
    """A size, how the network behaves until all is healed, and the faults."""

    seed: int
    size: SitesSize
    network: tuple[float, ...]  # fields of LinkFaults
    faults: tuple[RoundFault, ...]


def draw_round_scenario(seed: int) -> RoundScenario:
    """The scenario of a seed."""
    draw = random.Random(f"rounds {seed}")
    sites = draw.choice((2, 2, 3, 3, 4))
    size = SitesSize(
        sites=sites,
        processes=draw.choice((1, 2, 2)),
        quorum=draw.choice((1, 2)),
        in_flight=draw.choice((1, 4)),
        recent=draw.choice((1, 2, 3)),
        waits=draw.random() < 0.3,
        save_every=draw.choice((1, 2, 3)),
        late=(draw.uniform(5.0, 30.0),) if draw.random() < 0.2 else (),
        joiners=random.Random(f"joiners {seed}").choice((0, 0, 1, 3)),
    )
    faults = sorted((_draw_fault(draw, size) for _ in range(draw.randint(1, 6))), key=lambda fault: fault.at)
    rough = draw.random() < 0.75
    most = LinkFaults(duplicate=0.15, reorder=0.3, delay=0.05, corrupt=0.0, lose=0.1)
    network = tuple(draw.random() * each if rough else 0.0 for each in most)
    return RoundScenario(seed=seed, size=size, network=network, faults=tuple(faults))


def _draw_fault(draw: random.Random, size: SitesSize) -> RoundFault:
    kind = draw.choices([name for name, _ in KINDS], [weight for _, weight in KINDS])[0]
    sites = [f"s{number}" for number in range(size.sites)]
    everybody = [f"{site}.{number}" for site, number in product(sites, range(size.processes))]
    targets: tuple[str, ...] = ()
    if kind in ("kill", "stop", "deafen"):
        targets = (draw.choice(everybody),)
    elif kind in ("cut", "cut-one-way"):
        targets = tuple(draw.sample(sites, 2))
    elif kind.endswith("-site"):
        targets = (draw.choice(sites),)
    seconds = round(draw.choice((0.5, 4.0, 10.0, 25.0)) * (0.5 + draw.random()), 2)
    return RoundFault(
        round(2.0 + draw.random() * (WINDOW - 4.0), 2), kind, targets, seconds, draw.random() < 0.5, round(2.0 * draw.random(), 2)
    )


def schedule_round_faults(world: SitesWorld, scenario: RoundScenario) -> None:
    """Puts all faults, their ends and the healing on the world's clock."""
    world.network.faults = LinkFaults(*scenario.network)
    for fault in scenario.faults:
        world.loop.at(fault.at, lambda it: _await(world, it), fault)
    world.loop.at(HEAL_AT, lambda _: _heal(world))


def _await(world: SitesWorld, fault: RoundFault) -> None:
    coordinator = world.coordinator()
    if not fault.named or (coordinator is not None and coordinator.id is not None):
        world.loop.at(world.loop.now + fault.after * fault.named, lambda it: _strike(world, it), fault)
    elif world.loop.now + 2.0 < HEAL_AT:
        world.loop.at(world.loop.now + 0.2, lambda it: _await(world, it), fault)


def _strike(world: SitesWorld, fault: RoundFault) -> None:
    end = world.loop.now + fault.seconds
    coordinator = world.coordinator()
    leader = [coordinator.node.name] if coordinator is not None else []
    of_site = world.names(fault.targets[0]) if fault.targets and fault.targets[0] in world.disks else []
    if fault.kind in ("kill", "kill-site", "wipe-site", "kill-all", "restart-coordinator"):
        names = {"kill": fault.targets, "kill-all": world.names(), "restart-coordinator": leader}.get(fault.kind, of_site)
        _kill(world, names, end)
        if fault.kind == "wipe-site":
            world.disks[fault.targets[0]].position = None
    elif fault.kind in ("stop", "stop-site", "stop-coordinator"):
        for name in {"stop": fault.targets, "stop-coordinator": leader}.get(fault.kind, of_site):
            world.stop(name)
            world.loop.at(end, world.go_on, name)
    elif fault.kind == "take-over":
        other = next((name for name in HUBS if not world.alive(name)), None)
        if other is not None:
            world.start(other)
    elif fault.kind == "slow-disk":
        world.journal.slowness = 40.0
        world.loop.at(end, lambda _: setattr(world.journal, "slowness", 1.0))
    elif fault.kind == "slow-site":
        world.step_seconds[fault.targets[0]] *= 3.0
    else:
        _cut(world, fault, end)


def _kill(world: SitesWorld, names: Sequence[str], end: float) -> None:
    for name in names:
        world.kill(name)
        world.loop.at(end, world.start, name)


def _cut(world: SitesWorld, fault: RoundFault, end: float) -> None:
    if fault.kind == "deafen":  # from coordinators alone
        first, second = list(fault.targets), list(HUBS)
    elif fault.kind == "isolate-site":
        first = world.names(fault.targets[0])
        second = [name for name in (*world.names(), *HUBS) if name not in first]
    else:
        first, second = (world.names(site) for site in fault.targets)
    pairs = list(product(first, second))
    if fault.kind != "cut-one-way":
        pairs += [(there, here) for here, there in pairs]
    for pair in pairs:
        world.network.cut(*pair)

    def mend(_: object) -> None:
        for pair in pairs:
            world.network.join(*pair)

    world.loop.at(end, mend)


def _heal(world: SitesWorld) -> None:
    """All processes run and hear one another, and are started again where they end."""
    world.network.faults = None
    world.network._cut.clear()
    world.journal.slowness = 1.0
    for name in world.names():
        world.go_on(name)
        world.start(name)
    for name in HUBS:
        world.go_on(name)
    _supervise(world)


def _supervise(world: SitesWorld) -> None:
    """Somebody coordinates: also where the one that was left finds out later that it was replaced by one that is gone."""
    if world.coordinator() is None:
        dead = next(name for name in HUBS if not world.alive(name) or world.coordinators[name].deposed)
        world.kill(dead)
        world.start(dead)
    world.loop.at(world.loop.now + SUPERVISED_EVERY, lambda _: _supervise(world))
