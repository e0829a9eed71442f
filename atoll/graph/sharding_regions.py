"""Regions: products that must be divided alike, and the tags that say which dimension of a value is made of their columns."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx

from atoll.graph.sharding_rewrites import Cut

__all__ = ["NoRuleError", "Region", "Regions", "Span", "Tag", "require"]

Span = tuple[fx.Node, int, int]  # a product, and the range of its columns


class NoRuleError(Exception):
    """These products cannot be divided."""

    def __init__(self, sources: frozenset[fx.Node]):
        super().__init__(sources)
        self.sources = sources


def require(condition: bool) -> None:
    """Rules state what must hold for a tag to pass; what does not hold withdraws it."""
    if not condition:
        raise ValueError("the rule does not apply")


@dataclass(frozen=True)
class Tag:
    """Dimension `dim` of a value is made of columns of products. Every span describes the whole of the dimension."""

    spans: frozenset[Span]
    dim: int
    vocabulary: bool = False  # already normalised over the tagged dimension
    outer: int = 1  # the dimension is this many samples of the tagged one, as when heads are folded into the batch
    pieces: tuple[tuple[int, int], ...] = ()  # of a list of tensors: the range of the dimension that each one is

    @property
    def sources(self) -> frozenset[fx.Node]:
        """The products whose columns these are."""
        return frozenset(source for source, _, _ in self.spans)


class Region:
    """Products that must be divided alike, and into how many parts at most."""

    def __init__(self, columns: int):
        self.units = columns
        self.ended = False  # in a product by depth or in a loss
        self.vocabulary = False  # in a loss


class Regions:
    """All regions of a layer. Columns have a boundary where fused projections are taken apart; each piece is divided by itself."""

    def __init__(self, fused: frozenset[fx.Node]) -> None:
        self.fused = fused  # products to be seen as two or three projections in one
        self.of: dict[fx.Node, Region] = {}
        self._boundaries: dict[fx.Node, set[int]] = defaultdict(set)

    def start(self, source: fx.Node, columns: int) -> None:
        """A product whose columns may be divided."""
        self.of[source] = Region(columns)

    def joined(self, sources: frozenset[fx.Node]) -> frozenset[fx.Node]:
        """All products that are divided as these are."""
        regions = {id(self.of[source]) for source in sources}
        return frozenset(source for source, region in self.of.items() if id(region) in regions)

    def unite(self, sources: frozenset[fx.Node]) -> Region:
        """The one region of these products."""
        first, *rest = {id(self.of[source]): self.of[source] for source in sorted(sources, key=lambda source: source.name)}.values()
        for other in rest:
            first.units = math.gcd(first.units, other.units)
            first.ended = first.ended or other.ended
            first.vocabulary = first.vocabulary or other.vocabulary
            for source, region in self.of.items():
                if region is other:
                    self.of[source] = first
        return first

    def limit(self, sources: frozenset[fx.Node], size: int) -> None:
        """A dimension of `size` must be divided in whole units."""
        region = self.unite(sources)
        region.units = math.gcd(region.units, size)
        if region.units < 2:
            raise NoRuleError(self.joined(sources))

    def piece(self, tag: Tag, start: int, stop: int, size: int) -> Tag:
        """The range `start` to `stop` of a tagged dimension of `size`, divided by itself."""
        require(tag.outer == 1)
        self.limit(tag.sources, math.gcd(start, stop - start))
        spans = set()
        for source, first, last in tag.spans:
            columns = last - first
            require(columns * start % size == 0 and columns * stop % size == 0)
            span = (source, first + columns * start // size, first + columns * stop // size)
            self._boundaries[source] |= {span[1], span[2]}
            spans.add(span)
        return replace(tag, spans=frozenset(spans), pieces=())

    def cut(self, tag: Tag, size: int, dim: int | None = None) -> Cut:
        """How a dimension of `size` that is made of the tagged columns is divided. Known only once the whole layer was seen."""
        units = self.of[next(iter(tag.spans))[0]].units
        found = {self._blocks(span, size) for span in tag.spans}
        if len(found) != 1 or any(block % units for block in next(iter(found))):
            raise NoRuleError(self.joined(tag.sources))
        return Cut(tag.dim if dim is None else dim, found.pop(), units)

    def _blocks(self, span: Span, size: int) -> tuple[int, ...]:
        source, start, stop = span
        inside = sorted(point for point in self._boundaries[source] if start < point < stop)
        points = [start, *inside, stop]
        if any((point - start) * size % (stop - start) for point in points):
            raise NoRuleError(self.joined(frozenset([source])))
        return tuple((b - a) * size // (stop - start) for a, b in pairwise(points))
