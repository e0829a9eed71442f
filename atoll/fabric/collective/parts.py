"""How large a part each peer reduces: a linear program over measured rates (HiGHS). Pure.

A part has an owner, who pulls everybody's contribution to it and hands the sum out. With x[o] the owner's share, what every interface and
link carries is linear in x; the program minimises the time of the busiest. Sending contributions and gathering results overlap, so a
direction of an interface carries the sum of both. Latencies and processors are not in it: it is a bound.
"""

import math
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from atoll.errors import FabricError

__all__ = ["Network", "Parts", "PeerRates", "equal_network", "parts"]


class PeerRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One peer's interface, as measured."""

    name: str
    up_bytes_per_s: float = 1.0
    down_bytes_per_s: float = 1.0


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peers, and what links between two of them carry where that is less than their interfaces do: by (from, to)."""

    peers: tuple[PeerRates, ...]
    links_bytes_per_s: dict[tuple[str, str], float] = {}

    def __post_init__(self) -> None:
        names = [peer.name for peer in self.peers]
        if not names or len(set(names)) != len(names):
            raise FabricError(f"a collective needs peers with different names, got {', '.join(names) or 'none'}")
        for peer in self.peers:
            if not all(0 < rate < math.inf for rate in (peer.up_bytes_per_s, peer.down_bytes_per_s)):
                raise FabricError(f"{peer.name}: rates must be positive and finite, got {peer}")
        for (source, target), rate in self.links_bytes_per_s.items():
            if source == target or not {source, target} <= set(names):
                raise FabricError(f"link {source!r}–{target!r}: a link joins two of {', '.join(names)}")
            if not 0 < rate < math.inf:
                raise FabricError(f"link {source!r}–{target!r}: the rate must be positive and finite, got {rate}")


def equal_network(names: Sequence[str], bytes_per_s: float = 25e6) -> Network:
    """Peers of which nothing is known: all alike."""
    return Network(peers=tuple(PeerRates(name=name, up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s) for name in names))


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the tensor by owner, and the bound in seconds."""

    owners: dict[str, float]
    bound_seconds: float


def parts(network: Network, nbytes: float, contributors: Collection[str] | None = None) -> Parts:
    """The division that takes least time for the busiest interface. `nbytes`: of the whole tensor, as it travels.

    Any peer may own a part, whether it contributes or not; all get the result.
    """
    names = [peer.name for peer in network.peers]
    giving = set(names if contributors is None else contributors)
    if not giving or not giving <= set(names):
        raise FabricError(f"contributors are peers of the network, and somebody contributes; unknown: {sorted(giving - set(names))}")
    if len(names) == 1 or not nbytes:
        return Parts(owners={names[0]: 1.0}, bound_seconds=0.0)
    loads = _loads(network, giving)
    seconds = _least_seconds(loads)
    shares = _most_even(loads, seconds)
    return Parts(owners=dict(zip(names, shares, strict=True)), bound_seconds=seconds * nbytes)


def _loads(network: Network, giving: Collection[str]) -> np.ndarray:
    """A row for every direction of every interface and link: the seconds it takes for each byte of each owner's part."""
    count = len(network.peers)
    place = {peer.name: number for number, peer in enumerate(network.peers)}
    own, everything = np.eye(count), np.ones(count)
    rows = []
    for number, peer in enumerate(network.peers):
        others = everything - own[number]
        contributed, gathered = float(peer.name in giving), len(set(giving) - {peer.name})
        rows.append((contributed * others + (count - 1) * own[number]) / peer.up_bytes_per_s)
        rows.append((others + gathered * own[number]) / peer.down_bytes_per_s)
    for (source, target), rate in network.links_bytes_per_s.items():
        rows.append((float(source in giving) * own[place[target]] + own[place[source]]) / rate)
    return np.array(rows)


def _least_seconds(loads: np.ndarray) -> float:
    """The least time for a byte. Solved again in units of the result until that is no tiny number: HiGHS's tolerances are absolute."""
    unit = float(loads.max())
    for _ in range(8):
        time = _solve(np.column_stack([loads / unit, -np.ones(len(loads))]), np.zeros(len(loads)))[-1]
        if time > 0.1:
            break
        unit *= max(time, 1e-6)
    return time * unit


def _most_even(loads: np.ndarray, seconds: float) -> list[float]:
    """Of the divisions within a time, the one with the smallest largest part: where one peer is the bottleneck many are equally fast."""
    count = loads.shape[1]
    fast = np.column_stack([loads / seconds, np.zeros(len(loads))])
    even = np.column_stack([np.eye(count), -np.ones(count)])
    found = _solve(np.vstack([fast, even]), np.append(np.full(len(loads), 1 + 1e-6), np.zeros(count)))
    return [max(0.0, share) for share in found[:-1]]


def _solve(rows: np.ndarray, bounds: np.ndarray) -> list[float]:
    """Shares that make the whole with `rows · (shares, last) <= bounds`, and `last`, which is minimised."""
    from scipy.optimize import linprog  # takes a moment to load, and only whoever plans a reduction needs it

    count = rows.shape[1] - 1
    last = np.append(np.zeros(count), 1.0)
    found = linprog(last, A_ub=rows, b_ub=bounds, A_eq=1.0 - last[None], b_eq=[1.0], bounds=(0, None), method="highs")
    if not found.success or found.x is None:
        raise FabricError(f"the parts of a reduction could not be divided: {found.message}")
    return [float(value) for value in found.x]
