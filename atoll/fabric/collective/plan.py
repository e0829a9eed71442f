"""RoundPlan: who contributes what to a reduction, and who sums which part. Pure; made by one, known to all."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from atoll.errors import FabricError
from atoll.fabric.collective.parts import Network, parts

__all__ = ["Cell", "Missing", "RoundMember", "RoundPlan", "make_plan"]

BLOCK = 256  # elements that codecs encode together: parts begin and end between blocks
CHUNK_SECONDS = 0.125  # of the round that a chunk takes: the last one's way to its owner and back comes on top of the bound
CHUNK_ELEMENTS = (1 << 14, 1 << 20)  # of a chunk, at least and at most: every chunk costs processors, and a large one memory and caches
Missing: TypeAlias = Literal["fail", "leave out"]


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
