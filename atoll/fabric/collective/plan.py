"""RoundPlan: who contributes what to a reduction, who sums which part, and over which way it travels. Pure; made by one, known to all."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from atoll.errors import FabricError
from atoll.fabric.collective.parts import Network, Parts, WireRatios, parts

__all__ = ["Cell", "Missing", "RoundMember", "RoundPlan", "make_plan"]

BLOCK = 256  # elements that codecs encode together: parts begin and end between blocks
CHUNK_SECONDS = 0.125  # of the round that a chunk takes: the last one's way to its owner and back comes on top of the bound
CHUNK_ELEMENTS = (1 << 14, 1 << 20)  # of a chunk, at least and at most: every chunk costs processors, and a large one memory and caches
Missing: TypeAlias = Literal["fail", "leave out"]


class RoundMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A peer in a round. `weight` None: it contributes nothing."""

    name: str
    site: str = ""
    weight: float | None = 1.0
    receives: bool = True


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Elements `start` to `stop`: who sums them, and who stands in for each other site (by site)."""

    start: int
    stop: int
    owner: str
    relays: dict[str, str] = {}

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
    dtype: str = "float32"  # of the result
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

    @property
    def receivers(self) -> tuple[str, ...]:
        """Who gets the result, in order."""
        return tuple(member.name for member in self.members if member.receives)

    def chunks(self, cell: Cell) -> list[tuple[int, int]]:
        """The pieces in which a cell travels, all about equal: (start, stop)."""
        count = -(-cell.elements // self.chunk_elements)
        step = -(-cell.elements // (count * BLOCK)) * BLOCK
        return [(start, min(start + step, cell.stop)) for start in range(cell.start, cell.stop, step)]

    def head(self, cell: Cell, site: str) -> str:
        """Who sums a site's contributions to a cell."""
        return cell.relays.get(site, cell.owner)

    def children(self, cell: Cell, head: str) -> list[tuple[str, tuple[str, ...]]]:
        """Whose sums a head adds to its own contribution: who sends, and whose contributions those are. In the order of addition."""
        site = self.member(head).site
        found: list[tuple[str, tuple[str, ...]]] = [
            (name, (name,)) for name in self.contributors if name != head and self.member(name).site == site
        ]
        if head == cell.owner:
            for other, relay in cell.relays.items():
                inside = tuple(name for name in self.contributors if self.member(name).site == other)
                found += [(relay, inside)] if inside else []
        places = self.index
        return sorted(found, key=lambda child: places[child[0]])

    def target(self, cell: Cell, name: str) -> str | None:
        """To whom a member's contribution (or the sum of its site) goes; None for the owner."""
        head = self.head(cell, self.member(name).site)
        if name != head:
            return head
        return None if name == cell.owner else cell.owner

    def source(self, cell: Cell, name: str) -> str | None:
        """From whom a member gets the reduced cell; None for the owner."""
        return self.target(cell, name)

    def targets(self, cell: Cell, name: str) -> list[str]:
        """Who gets the reduced cell from a member."""
        others = [member.name for member in self.members if self.wants(cell, member.name)]
        return [other for other in others if self.source(cell, other) == name]

    def wants(self, cell: Cell, name: str) -> bool:
        """Whether a member needs the reduced cell: for itself, or to pass it on."""
        member = self.member(name)
        stands_in = cell.relays.get(member.site) == name
        return member.receives or (stands_in and any(other.receives for other in self.members if other.site == member.site))


def make_plan(
    round_id: str,
    elements: int,
    members: Sequence[RoundMember],
    network: Network,
    *,
    ratios: WireRatios | None = None,
    element_bytes: int = 4,
    dtype: str = "float32",
    mean: bool = False,
    missing: Missing = "fail",
    chunk_elements: int | None = None,
    begin_seconds: float = 30.0,
) -> RoundPlan:
    """A plan with parts by the linear program over the network, whose sites are the members' sites.

    `chunk_elements` None: chunks that each take an eighth of a second of the round, or a sixth of their part.
    """
    sites = {peer.name: peer.site for peer in network.peers}
    if set(sites) != {member.name for member in members}:
        raise FabricError(f"round {round_id}: rates are known of {', '.join(sites)}; members are {', '.join(m.name for m in members)}")
    members = tuple(msgspec.structs.replace(member, site=sites[member.name]) for member in members)
    contributors = [member.name for member in members if member.weight is not None]
    receivers = [member.name for member in members if member.receives]
    found = parts(network, elements * element_bytes, contributors=contributors, receivers=receivers, ratios=ratios)
    cells = make_cells(found, elements)
    return RoundPlan(
        id=round_id,
        elements=elements,
        members=members,
        cells=cells,
        dtype=dtype,
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


def make_cells(found: Parts, elements: int) -> tuple[Cell, ...]:
    """Shares as whole blocks: an owner's part, cut where somebody else begins to stand in for a site."""
    cells: list[Cell] = []
    for owner, (start, stop) in _divide(found.owners, 0, elements).items():
        inside = {site: _divide(shares, start, stop) for site, shares in found.relays[owner].items()}
        edges = sorted({start, stop, *(edge for ranges in inside.values() for span in ranges.values() for edge in span)})
        for first, last in itertools.pairwise(edges):
            relays = {site: _holder(ranges, first) for site, ranges in inside.items()}
            cells.append(Cell(start=first, stop=last, owner=owner, relays=relays))
    return tuple(cells)


def _divide(shares: Mapping[str, float], start: int, stop: int) -> dict[str, tuple[int, int]]:
    """A range in proportion to shares, in whole blocks (the last may be short); who gets nothing is left out."""
    total = sum(shares.values())
    blocks = -(-(stop - start) // BLOCK)
    found: dict[str, tuple[int, int]] = {}
    before, given = 0.0, 0
    for name, share in shares.items():
        before += share if total else 1.0
        upto = round(blocks * before / (total or len(shares)))
        if upto > given:
            found[name] = (start + given * BLOCK, min(start + upto * BLOCK, stop))
            given = upto
    return found


def _holder(ranges: Mapping[str, tuple[int, int]], element: int) -> str:
    return next(name for name, (start, stop) in ranges.items() if start <= element < stop)


def _check(plan: RoundPlan) -> None:
    """Plans arrive from elsewhere: what cannot be run is refused before anything begins."""

    def refuse(text: str) -> None:
        raise FabricError(f"round {plan.id}: {text}")

    names = {member.name for member in plan.members}
    sites = {member.site for member in plan.members}
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
        if set(cell.relays) != sites - {plan.member(cell.owner).site}:
            refuse(f"cell {cell} needs somebody for each other site")
        if any(host not in names or plan.member(host).site != site for site, host in cell.relays.items()):
            refuse(f"cell {cell}: who stands in for a site is a member there")
        edge = cell.stop
    if edge != plan.elements:
        refuse(f"cells end at {edge} of {plan.elements} elements")
