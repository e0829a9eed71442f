"""What tensor parallelism does to a layer, in terms of the captured program: how tensors are cut, and which operators change.

The cost model counts these; the runtime carries them out on its copy of the program. A value that is cut is held in parts, one a device;
every other value is the same on every device.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from torch import fx

__all__ = [
    "ByDepth",
    "Cut",
    "DivideDraw",
    "DivideLoss",
    "DivideNormalisation",
    "DividedParameter",
    "Gathering",
    "Lookup",
    "Operand",
    "Rewrite",
    "Scale",
    "Sharding",
    "Split",
    "deal",
]

Split = Literal["", "rows", "columns", "depth"]


def deal(units: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """How many of `units` each device gets: in proportion to `shares`, by largest remainder, at least one each."""
    total = sum(shares)
    assert 0 < len(shares) <= units, f"{units} units cannot be dealt out to {len(shares)} devices"
    counts = [max(1, units * share // total) for share in shares]

    def owed(device: int) -> int:
        return units * shares[device] - counts[device] * total

    while sum(counts) < units:
        counts[max(range(len(shares)), key=lambda device: (owed(device), -device))] += 1
    while sum(counts) > units:
        counts[min((device for device in range(len(shares)) if counts[device] > 1), key=lambda device: (owed(device), device))] -= 1
    return tuple(counts)


@dataclass(frozen=True)
class Cut:
    """How a dimension is divided: each of its consecutive blocks by itself, in whole units.

    There are several blocks where projections are fused into one (query, key and value): a device has the same units of each. A
    dimension may be longer than its blocks: then it repeats them, as when heads are folded into the batch.
    """

    dim: int
    blocks: tuple[int, ...]  # sizes
    units: int  # of every block; a vocabulary has as many as rows

    @property
    def size(self) -> int:
        """Length of all blocks together."""
        return sum(self.blocks)

    def parts(self, shares: tuple[int, ...], index: int) -> tuple[tuple[int, int], ...]:
        """The ranges of the dimension that device `index` holds."""
        counts = deal(self.units, shares)
        before, own = sum(counts[:index]), counts[index]
        starts = accumulate(self.blocks, initial=0)
        return tuple(
            (start + before * block // self.units, start + (before + own) * block // self.units)
            for start, block in zip(starts, self.blocks, strict=False)
        )


@dataclass(frozen=True)
class DividedParameter:
    """A parameter of which each device holds a part."""

    name: str  # the user's
    shape: tuple[int, ...]  # of the whole
    cut: Cut


@dataclass(frozen=True)
class Operand:
    """`value`, the same on every device, is read by `node`, which is computed in parts.

    Each device's gradient for it is a part of a sum. With a `cut`, a device reads only its part of the value.
    """

    node: fx.Node
    value: fx.Node
    gradient: bool  # whether one may flow: in-place operators can let one flow where none was
    cut: Cut | None = None


@dataclass(frozen=True)
class Scale:
    """An argument of `node` that is a size: `size` becomes the device's part of it."""

    node: fx.Node
    position: int  # among the arguments
    index: int | None  # in a list of sizes
    size: int | fx.Node
    units: int


@dataclass(frozen=True)
class ByDepth:
    """A product that sums over a divided dimension: devices' results are added up, then the bias is added once."""

    node: fx.Node


@dataclass(frozen=True)
class DivideDraw:
    """An operator that draws random numbers for a divided value: drawn for the whole, they do not depend on the division."""

    node: fx.Node
    cut: Cut  # of what is drawn
    order: tuple[int, ...]  # its dimensions, outermost in memory first


@dataclass(frozen=True)
class DivideNormalisation:
    """A log-softmax over a divided dimension."""

    node: fx.Node
    cut: Cut


@dataclass(frozen=True)
class DivideLoss:
    """A cross-entropy, or the negative log-likelihood after a log-softmax, over a divided dimension."""

    node: fx.Node
    cut: Cut


@dataclass(frozen=True)
class Lookup:
    """An embedding whose table is divided by rows: what a device does not hold is zero, and the results are added up."""

    node: fx.Node
    cut: Cut


@dataclass(frozen=True)
class Gathering:
    """What else changes where lanes divide a layer: divided values are those of all lanes' samples, everything else of the lane's own."""

    samples: dict[fx.Node, tuple[int, int]]  # value → the dimension that runs over samples, and its length for one sample
    sizes: tuple[tuple[fx.Node, fx.Node, int], ...]  # operator, a size among its arguments that counts samples, its value for one sample
    refused: str = ""  # why lanes cannot divide this layer; "" where they can


Rewrite = Operand | Scale | ByDepth | DivideDraw | DivideNormalisation | DivideLoss | Lookup


@dataclass
class Sharding:
    """How one layer divides. Bytes are of the whole captured batch."""

    split: dict[int, Split] = field(default_factory=dict)  # operator position → what tensor parallelism divides of it
    values: set[fx.Node] = field(default_factory=set)  # values of which each device holds a part
    parameters: set[fx.Node] = field(default_factory=set)  # parameters of which each device holds a part
    units: int = 0  # the most equal parts; 0: no limit but the vocabulary's
    reduced_bytes: float = 0.0  # summed over devices in forward; as much again in backward
    reductions: int = 0
    backward: float = 1.0  # in backward, as a multiple of that: what enters divided regions and needs no gradient is not summed
    divided: dict[fx.Node, DividedParameter] = field(default_factory=dict)  # how those parameters are divided
    rewrites: list[Rewrite] = field(default_factory=list)  # in the program's order
    gathering: Gathering = field(default_factory=lambda: Gathering({}, ()))
