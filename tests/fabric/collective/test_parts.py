"""The linear program against closed forms, brute force and what every division must obey."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import FabricError
from atoll.fabric.collective import Network, Parts, PeerRates, equal_network, parts

RATES = st.floats(1e5, 1e9)
FEW = settings(max_examples=settings().max_examples // 3)


def network_of(rates: list[tuple[float, float]]) -> Network:
    return Network(peers=tuple(PeerRates(name=f"p{i}", up_bytes_per_s=up, down_bytes_per_s=down) for i, (up, down) in enumerate(rates)))


def seconds_of(network: Network, owners: dict[str, float], nbytes: float, contributors: list[str]) -> float:
    """What a division takes, written down again from the definition."""
    worst = 0.0
    for peer in network.peers:
        own = owners[peer.name]
        up = (1 - own) * (peer.name in contributors) + own * (len(network.peers) - 1)
        down = (1 - own) + own * len([name for name in contributors if name != peer.name])
        worst = max(worst, up * nbytes / peer.up_bytes_per_s, down * nbytes / peer.down_bytes_per_s)
    for (source, target), rate in network.links_bytes_per_s.items():
        worst = max(worst, (owners[target] * (source in contributors) + owners[source]) * nbytes / rate)
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
    found = parts(equal_network(["a", "b", "c", "d", "e"], 1e7), 1e8, contributors=["a"])
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
    pairs = st.sampled_from(list(itertools.permutations(names, 2)))
    network = msgspec.structs.replace(network, links_bytes_per_s=data.draw(st.dictionaries(pairs, RATES, max_size=4)))
    contributors = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    found = parts(network, 1e8, contributors)
    assert sum(found.owners.values()) == pytest.approx(1)
    taken = seconds_of(network, found.owners, 1e8, contributors)
    assert taken <= found.bound_seconds * (1 + 1e-4) + 1e-6
    other = data.draw(st.lists(st.floats(0, 1), min_size=len(names), max_size=len(names)).filter(lambda shares: sum(shares) > 0.01))
    division = {name: share / sum(other) for name, share in zip(names, other, strict=True)}
    assert seconds_of(network, division, 1e8, contributors) >= found.bound_seconds * (1 - 1e-4) - 1e-6


@FEW
@given(st.lists(st.tuples(st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([1.0, 2.0, 4.0])), min_size=3, max_size=3))
def test_brute_force_over_a_grid_finds_nothing_better(rates: list[tuple[float, float]]) -> None:
    network = network_of(rates)
    names = [peer.name for peer in network.peers]
    found = parts(network, 1.0)
    grid = [(a / 24, b / 24, 1 - (a + b) / 24) for a, b in itertools.product(range(25), repeat=2) if a + b <= 24]
    best = min(seconds_of(network, dict(zip(names, shares, strict=True)), 1.0, names) for shares in grid)
    assert found.bound_seconds <= best + 1e-6
    assert best <= found.bound_seconds * 1.2, "the grid comes near it, so it is not too low"


def test_a_slow_link_between_two_peers_is_spared() -> None:
    """Everything could pass by the third, who owns all: then the link carries nothing."""
    names = ["a", "b", "c"]
    even = equal_network(names, 1e7)
    slow = msgspec.structs.replace(even, links_bytes_per_s={("a", "b"): 1e5, ("b", "a"): 1e5})
    assert parts(slow, 1e8).owners["c"] > 0.9 > parts(even, 1e8).owners["c"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(FabricError, match="different names"):
        equal_network(["a", "a"])
    with pytest.raises(FabricError, match="must be positive"):
        network_of([(0.0, 1.0), (1.0, 1.0)])
    with pytest.raises(FabricError, match="a link joins two of a, b"):
        msgspec.structs.replace(equal_network(["a", "b"]), links_bytes_per_s={("a", "z"): 1.0})
    with pytest.raises(FabricError, match="unknown: \\['z'\\]"):
        parts(equal_network(["a", "b"]), 1e6, contributors=["z"])
    assert parts(equal_network(["a"]), 1e6) == Parts(owners={"a": 1.0}, bound_seconds=0.0)
