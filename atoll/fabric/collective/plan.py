"""RoundPlan: who contributes what to a reduction, and who sums which part. Pure; made by one, known to all.

How large a part each peer reduces is a linear program over measured rates (HiGHS). A part has an owner, who pulls everybody's contribution
to it and hands the sum out. With x[o] the owner's share, what every interface and link carries is linear in x; the program minimises the
time of the busiest. Sending contributions and gathering results overlap, so a direction of an interface carries the sum of both. Latencies
and processors are not in it: it is a bound.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from atoll.errors import FabricError

__all__ = ["Cell", "Missing", "Network", "Parts", "PeerRates", "RoundMember", "RoundPlan", "equal_network", "make_plan", "parts"]

BLOCK = 256  # elements that codecs encode together: parts begin and end between blocks
CHUNK_SECONDS = 0.125  # of the round that a chunk takes: the last one's way to its owner and back comes on top of the bound
CHUNK_ELEMENTS = (1 << 14, 1 << 20)  # of a chunk, at least and at most: every chunk costs processors, and a large one memory and caches
Missing: TypeAlias = Literal["fail", "leave out"]


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


class RoundMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A peer in a round; all get the result. `weight` None: it contributes nothing."""

    name: str
    weight: float | None = 1.0


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Elements `start` to `stop`, and who sums them."""

    start: int
    stop: int
    owner: str

    @property
    def elements(self) -> int:
        """How many."""
        return self.stop - self.start


class RoundPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reduction. `id` is never used twice: what belongs to another round is refused.

    `missing`: what happens when a contributor is lost. "fail": the parts it belongs to fail, naming it. "leave out": they are summed
    without it from there on, and the result says so. `mean` divides each value by the weights that are in it.
    """

    id: str
    elements: int
    members: tuple[RoundMember, ...]
    cells: tuple[Cell, ...]
    mean: bool = False
    missing: Missing = "fail"
    chunk_elements: int = 1 << 19  # at most, sent, decoded and summed as one
    bound_seconds: float = 0.0
    stall_seconds: float = 10.0  # without progress of what was begun
    begin_seconds: float = 30.0  # until a member begins

    def __post_init__(self) -> None:
        _check(self)

    def member(self, name: str) -> RoundMember:
        """By name; FabricError if it is not one."""
        for member in self.members:
            if member.name == name:
                return member
        raise FabricError(f"round {self.id}: {name} is not a member; members are {', '.join(member.name for member in self.members)}")

    @property
    def index(self) -> dict[str, int]:
        """Places of the members: what results count contributions by."""
        return {member.name: place for place, member in enumerate(self.members)}

    @property
    def contributors(self) -> tuple[str, ...]:
        """Who contributes, in order."""
        return tuple(member.name for member in self.members if member.weight is not None)

    def others(self, name: str) -> list[str]:
        """All members but one, in order."""
        return [member.name for member in self.members if member.name != name]

    def chunks(self, cell: Cell) -> list[tuple[int, int]]:
        """The pieces in which a cell travels, all about equal: (start, stop)."""
        count = -(-cell.elements // self.chunk_elements)
        step = -(-cell.elements // (count * BLOCK)) * BLOCK
        return [(start, min(start + step, cell.stop)) for start in range(cell.start, cell.stop, step)]


def make_plan(
    round_id: str,
    elements: int,
    members: Sequence[RoundMember],
    network: Network,
    *,
    element_bytes: float = 4.0,
    mean: bool = False,
    missing: Missing = "fail",
    chunk_elements: int | None = None,
    begin_seconds: float = 30.0,
) -> RoundPlan:
    """A plan with parts by the linear program over the network. `element_bytes`: of a value as it travels.

    `chunk_elements` None: chunks that each take an eighth of a second of the round, or a sixth of their part.
    """
    known, names = [peer.name for peer in network.peers], [member.name for member in members]
    if set(known) != set(names):
        raise FabricError(f"round {round_id}: rates are known of {', '.join(known)}; members are {', '.join(names)}")
    found = parts(network, elements * element_bytes, [member.name for member in members if member.weight is not None])
    cells = make_cells(found.owners, elements)
    return RoundPlan(
        id=round_id,
        elements=elements,
        members=tuple(members),
        cells=cells,
        mean=mean,
        missing=missing,
        chunk_elements=chunk_elements or _chunk_elements(cells, found.bound_seconds),
        bound_seconds=found.bound_seconds,
        stall_seconds=2.0 + 4.0 * found.bound_seconds,
        begin_seconds=begin_seconds,
    )


def _chunk_elements(cells: Sequence[Cell], bound_seconds: float) -> int:
    """Small enough that little is left to do when the last chunk was sent, large enough that chunks cost processors little."""
    largest = max((cell.elements for cell in cells), default=0)
    wanted = min(largest / 6, largest * CHUNK_SECONDS / bound_seconds if bound_seconds else math.inf)
    fewest, most = CHUNK_ELEMENTS
    return -(-int(min(max(wanted, fewest), most)) // BLOCK) * BLOCK


def make_cells(shares: Mapping[str, float], elements: int) -> tuple[Cell, ...]:
    """Shares as whole blocks (the last may be short); who gets nothing is left out."""
    total, blocks = sum(shares.values()), -(-elements // BLOCK)
    cells: list[Cell] = []
    before, given = 0.0, 0
    for owner, share in shares.items():
        before += share
        upto = round(blocks * before / total)
        if upto > given:
            cells.append(Cell(start=given * BLOCK, stop=min(upto * BLOCK, elements), owner=owner))
            given = upto
    return tuple(cells)


def _check(plan: RoundPlan) -> None:
    """Plans arrive from elsewhere: what cannot be run is refused before anything begins."""

    def refuse(text: str) -> None:
        raise FabricError(f"round {plan.id}: {text}")

    names = {member.name for member in plan.members}
    if len(names) != len(plan.members) or not plan.contributors:
        refuse("members need different names, and one of them contributes")
    if any(member.weight is not None and not 0 <= member.weight < math.inf for member in plan.members):
        refuse("weights are finite and not negative")
    if plan.chunk_elements < BLOCK or plan.chunk_elements % BLOCK or not (plan.stall_seconds > 0 and plan.begin_seconds > 0):
        refuse(f"chunks are a multiple of {BLOCK} elements, and time-outs are positive")
    edge = 0
    for cell in plan.cells:
        if cell.start != edge or cell.stop <= cell.start or cell.owner not in names:
            refuse(f"cell {cell} does not follow the one before it, or belongs to nobody")
        edge = cell.stop
    if edge != plan.elements:
        refuse(f"cells end at {edge} of {plan.elements} elements")
