"""The linear program against closed forms, brute force and what every division must obey."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import FabricError
from atoll.fabric.collective import Network, Parts, PeerRates, WireRatios, equal_network, parts

RATES = st.floats(1e5, 1e9)
FEW = settings(max_examples=settings().max_examples // 3)


def network_of(rates: list[tuple[float, float]], sites: list[str] | None = None) -> Network:
    places = sites or [""] * len(rates)
    return Network(
        peers=tuple(
            PeerRates(name=f"p{i}", site=site, up_bytes_per_s=up, down_bytes_per_s=down)
            for i, ((up, down), site) in enumerate(zip(rates, places, strict=True))
        )
    )


def flat_seconds(network: Network, owners: dict[str, float], nbytes: float, contributors: list[str], receivers: list[str]) -> float:
    """What a division takes when all exchange directly, written down again from the definition."""
    worst = 0.0
    for peer in network.peers:
        own = owners[peer.name]
        up = (1 - own) * (peer.name in contributors) + own * len([name for name in receivers if name != peer.name])
        down = (1 - own) * (peer.name in receivers) + own * len([name for name in contributors if name != peer.name])
        worst = max(worst, up * nbytes / peer.up_bytes_per_s, down * nbytes / peer.down_bytes_per_s)
    return worst


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_equal_peers_own_equal_parts(count: int) -> None:
    found = parts(equal_network([f"p{i}" for i in range(count)], 1e7), 1e8)
    assert found.bound_seconds == pytest.approx(2 * (count - 1) / count * 10)
    assert all(share == pytest.approx(1 / count, rel=1e-4) for share in found.owners.values())


def test_one_peer_with_a_quarter_of_the_rate_owns_nothing() -> None:
    found = parts(network_of([(1e7, 1e7)] * 3 + [(2.5e6, 2.5e6)]), 1e8)
    assert found.bound_seconds == pytest.approx(4 * 10)
    assert found.owners["p3"] == pytest.approx(0, abs=1e-4)
    assert all(found.owners[name] == pytest.approx(1 / 3, abs=1e-3) for name in ("p0", "p1", "p2"))


def test_a_broadcast_costs_its_root_the_tensor_once() -> None:
    found = parts(equal_network(["a", "b", "c", "d", "e"], 1e7), 1e8, contributors=["a"], receivers=["b", "c", "d", "e"])
    assert found.bound_seconds == pytest.approx(10)


def test_peers_that_contribute_nothing_take_parts_from_those_that_do() -> None:
    network = equal_network(["a", "b", "c", "d"], 1e7)
    some = parts(network, 1e8, contributors=["a", "b"])
    assert some.bound_seconds < parts(network, 1e8).bound_seconds
    assert min(some.owners["c"], some.owners["d"]) >= max(some.owners["a"], some.owners["b"]) - 1e-6


@FEW
@given(st.lists(st.tuples(RATES, RATES), min_size=2, max_size=6), st.data())
def test_the_bound_is_what_the_division_takes_and_no_random_one_takes_less(rates: list[tuple[float, float]], data: st.DataObject) -> None:
    network = network_of(rates)
    names = [peer.name for peer in network.peers]
    contributors = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    receivers = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    found = parts(network, 1e8, contributors=contributors, receivers=receivers)
    assert sum(found.owners.values()) == pytest.approx(1)
    taken = flat_seconds(network, found.owners, 1e8, contributors, receivers)
    assert taken <= found.bound_seconds * (1 + 1e-4) + 1e-6
    other = data.draw(st.lists(st.floats(0, 1), min_size=len(names), max_size=len(names)).filter(lambda shares: sum(shares) > 0.01))
    division = {name: share / sum(other) for name, share in zip(names, other, strict=True)}
    assert flat_seconds(network, division, 1e8, contributors, receivers) >= found.bound_seconds * (1 - 1e-4) - 1e-6


@FEW
@given(st.lists(st.tuples(st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([1.0, 2.0, 4.0])), min_size=3, max_size=3))
def test_brute_force_over_a_grid_finds_nothing_better(rates: list[tuple[float, float]]) -> None:
    network = network_of(rates)
    names = [peer.name for peer in network.peers]
    found = parts(network, 1.0)
    grid = [(a / 24, b / 24, 1 - (a + b) / 24) for a, b in itertools.product(range(25), repeat=2) if a + b <= 24]
    best = min(flat_seconds(network, dict(zip(names, shares, strict=True)), 1.0, names, names) for shares in grid)
    assert found.bound_seconds <= best + 1e-6
    assert best <= found.bound_seconds * 1.2, "the grid comes near it, so it is not too low"


def crossing(network: Network, found: Parts, source: str, target: str, ratios: WireRatios) -> float:
    """Values that cross from one site to another, each sum and each result once."""
    site = {peer.name: peer.site for peer in network.peers}
    there = sum(share for owner, share in found.owners.items() if site[owner] == target)
    back = sum(share for owner, share in found.owners.items() if site[owner] == source)
    return there * ratios.outside + back * ratios.reduced


@FEW
@given(st.lists(st.tuples(RATES, RATES), min_size=3, max_size=6), st.data())
def test_shares_of_sites_make_the_parts(rates: list[tuple[float, float]], data: st.DataObject) -> None:
    sites = data.draw(st.lists(st.sampled_from(["x", "y", "z"]), min_size=len(rates), max_size=len(rates)))
    network = network_of(rates, sites)
    found = parts(network, 1e8)
    for owner, by_site in found.relays.items():
        home = next(peer.site for peer in network.peers if peer.name == owner)
        assert set(by_site) == set(network.sites) - {home}
        for site, shares in by_site.items():
            assert set(shares) == set(network.sites[site])
            assert sum(shares.values()) == pytest.approx(found.owners[owner], abs=1e-5)


def test_two_sites_exchange_once_over_a_shared_link() -> None:
    """25 M values of fp32 as int8 over 200 Mbit/s: every value crosses once in either direction, whatever happens inside."""
    peers = tuple(
        PeerRates(name=f"{site}{i}", site=site, up_bytes_per_s=1.25e9, down_bytes_per_s=1.25e9) for site in ("x", "y") for i in range(2)
    )
    network = Network(peers=peers, links_bytes_per_s={("x", "y"): 25e6, ("y", "x"): 25e6})
    ratios = WireRatios(inside=1.0, outside=0.254, reduced=0.254)
    found = parts(network, 1e8, ratios=ratios)
    assert found.bound_seconds == pytest.approx(0.254 * 1e8 / 25e6)
    assert crossing(network, found, "x", "y", ratios) == pytest.approx(0.254)


def test_interfaces_of_all_hosts_are_used_between_sites() -> None:
    """Four hosts with 200 Mbit/s each outside and fast inside: twice as fast as one interface a site would be."""
    peers = tuple(
        PeerRates(
            name=f"{site}{i}", site=site, up_bytes_per_s=25e6, down_bytes_per_s=25e6, inside_up_bytes_per_s=1e9, inside_down_bytes_per_s=1e9
        )
        for site in ("x", "y")
        for i in range(2)
    )
    found = parts(Network(peers=peers), 1e8)
    assert found.bound_seconds == pytest.approx(2.0)
    inside_only = parts(Network(peers=peers).without_sites(), 1e8)
    assert inside_only.bound_seconds == pytest.approx(6.0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(FabricError, match="different names"):
        equal_network(["a", "a"])
    with pytest.raises(FabricError, match="must be positive"):
        network_of([(0.0, 1.0), (1.0, 1.0)])
    with pytest.raises(FabricError, match="unknown: \\['z'\\]"):
        parts(equal_network(["a", "b"]), 1e6, contributors=["z"])
    assert parts(equal_network(["a"]), 1e6) == Parts(owners={"a": 1.0}, relays={"a": {}}, bound_seconds=0.0)
