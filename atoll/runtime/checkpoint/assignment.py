"""Who writes what: every number of every tensor exactly once, the work spread evenly over the ranks that hold it."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.local_shard import Keyed, Piece
from atoll.runtime.checkpoint.rectangles import Rectangle, disjoint, intersect, split_longest, uncovered, whole
from atoll.runtime.checkpoint.safetensors_file import DTYPES, dtype_name

__all__ = ["Agreement", "Assigned", "Layout", "Outline", "assign", "of_rank", "outlines"]

_SPLIT_BYTES = 16 * 2**20  # what several ranks hold is divided between them from this size on


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has of one stored tensor."""

    shape: tuple[int, ...]
    dtype: str
    rectangles: tuple[Rectangle, ...]


Layout = Mapping[str, Outline]  # a rank's, by key


class Assigned(NamedTuple):
    """A rectangle that a rank writes."""

    key: str
    rectangle: Rectangle


def assign(layouts: Sequence[Layout], itemsizes: Mapping[str, int]) -> list[list[Assigned]]:
    """What each rank writes, given what each rank holds. The same on every rank that computes it.

    Largest first, each to the holder with the least to write so far. Where ranks hold overlapping but different rectangles (replicas of a
    stage that split tensors differently), what is already spoken for is left out.
    """
    key_holders = _holders(layouts)
    overlapping = {key for key, holders in key_holders.items() if not disjoint(list(holders))}
    load = [0] * len(layouts)
    result: list[list[Assigned]] = [[] for _ in layouts]
    taken: dict[str, list[Rectangle]] = defaultdict(list)
    parts = [
        (math.prod(part.sizes) * itemsizes[key], key, part, ranks)
        for key, holders in key_holders.items()
        for rectangle, ranks in holders.items()
        for part in _divided(rectangle, rectangle.elements * itemsizes[key], len(ranks))
    ]
    for _, key, part, ranks in sorted(parts, key=lambda entry: (-entry[0], entry[1:])):
        before = [other for other in taken[key] if intersect(part, other)] if key in overlapping else []
        for rest in uncovered(part, before):
            rank = min(ranks, key=lambda r: (load[r], r))
            load[rank] += rest.elements * itemsizes[key]
            result[rank].append(Assigned(key, rest))
            taken[key].append(rest)
    _check_complete(layouts, taken)
    return [sorted(assigned) for assigned in result]


def _holders(layouts: Sequence[Layout]) -> dict[str, dict[Rectangle, tuple[int, ...]]]:
    holders: dict[str, dict[Rectangle, tuple[int, ...]]] = defaultdict(dict)
    first: dict[str, tuple[int, Outline]] = {}
    for rank, layout in enumerate(layouts):
        for key, outline in layout.items():
            before, known = first.setdefault(key, (rank, outline))
            if (known.shape, known.dtype) != (outline.shape, outline.dtype):
                one, other = f"{known.dtype} {list(known.shape)}", f"{outline.dtype} {list(outline.shape)}"
                raise CheckpointError(f"{key}: rank {before} has it as {one}, rank {rank} as {other}")
            for rectangle in outline.rectangles:
                holders[key][rectangle] = (*holders[key].get(rectangle, ()), rank)
    return holders


def _divided(rectangle: Rectangle, size_bytes: int, holders: int) -> list[Rectangle]:
    return [rectangle] if holders == 1 else split_longest(rectangle, max(1, min(holders, size_bytes // _SPLIT_BYTES)))


def _check_complete(layouts: Sequence[Layout], taken: Mapping[str, Sequence[Rectangle]]) -> None:
    shapes = {key: outline.shape for layout in layouts for key, outline in layout.items()}
    for key, shape in shapes.items():
        held = sum(rectangle.elements for rectangle in taken.get(key, ()))
        if held != whole(shape).elements:
            raise CheckpointError(f"{key}: all ranks together hold {held} of its {whole(shape).elements} elements; nothing was saved")


def outlines(tensors: Sequence[Keyed], mine: Sequence[Piece]) -> dict[str, Outline]:
    """What this rank holds, for the others to know."""
    rectangles: dict[str, list[Rectangle]] = {key: [] for key, _ in tensors}
    for piece in mine:
        rectangles[piece.key].append(piece.rectangle)
    return {
        key: Outline(shape=held.holding.shape, dtype=dtype_name(held.tensor.dtype, key), rectangles=tuple(rectangles[key]))
        for key, held in tensors
    }


class _Greeting(msgspec.Struct):
    """What a rank says before a save: a hash of what it holds, or why it cannot take part."""

    digest: str
    problem: str | None


class Agreement:
    """Who writes what. It is worked out when a rank's holdings change, and remembered."""

    def __init__(self, ranks: CheckpointRanks) -> None:
        self._ranks = ranks
        self._digests: list[str] = []
        self._mine: list[Assigned] = []
        self.everything: dict[str, Outline] = {}  # what there is to save on all ranks, without rectangles

    def reach(self, mine: Mapping[str, Outline], problem: str | None) -> list[Assigned]:
        """What this rank is to write. When any rank has a problem, every rank raises it."""
        digest = hashlib.sha256(msgspec.json.encode(dict(mine), order="sorted")).hexdigest()
        greetings = self._ranks.gather(_Greeting(digest, problem), _Greeting)
        for rank, greeting in enumerate(greetings):
            if greeting.problem is not None:
                raise CheckpointError(of_rank(rank, len(greetings), greeting.problem))
        if self._digests != [greeting.digest for greeting in greetings]:
            layouts = self._ranks.gather(dict(mine), dict[str, Outline])
            sizes = {key: DTYPES[outline.dtype].itemsize for layout in layouts for key, outline in layout.items()}
            self._mine = assign(layouts, sizes)[self._ranks.rank]
            self.everything = {
                key: msgspec.structs.replace(outline, rectangles=()) for layout in layouts for key, outline in layout.items()
            }
            self._digests = [greeting.digest for greeting in greetings]
        return self._mine


def of_rank(rank: int, count: int, text: str) -> str:
    """A sentence that says whose it is, where there are several."""
    return text if count == 1 else f"rank {rank}: {text}"
