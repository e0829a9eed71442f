"""Low rank: a matrix as the product of a tall and a wide one, found by one step of a power iteration that error feedback carries on.

After PowerSGD (Vogels, Karimireddy and Jaggi, 2019), with one change: everything that is summed is a whole number small enough for fp64 to
add without rounding. Sums then do not depend on their order, so every machine writes the same bytes and every receiver computes the same
tensor, whatever its matrix library does; and factors travel as int16, half the size of fp32.
"""

import math
from collections.abc import Iterator

import msgspec
import torch

from atoll.codec import CodecSpec
from atoll.codec.base import Codec, EncodedPart, Given, Header, Parts
from atoll.errors import CodecError, NonFiniteTensorError

__all__ = ["LowRank"]

_FACTOR = 2**15 - 1  # largest whole number of a factor
_MAX_RANK = 64
_MAX_SIDE = 2**23  # rows or columns up to which sums stay whole numbers below 2⁵³
_CHUNK = 2**16  # elements of the matrix taken at once: they become fp64


class LowRank(Codec):
    """`low-rank:4`: tensors of two and more dimensions as matrices (first dimension × the others); vectors travel as they are.

    Tensors with NaN or Inf are refused.
    """

    name = "low-rank"

    def __init__(self, rank: int) -> None:
        if not 1 <= rank <= _MAX_RANK:
            raise CodecError(f"low-rank takes a rank between 1 and {_MAX_RANK}, got {rank}")
        self.rank = rank

    @property
    def text(self) -> str:
        return f"low-rank:{self.rank}"

    @property
    def spec(self) -> CodecSpec:
        """For a matrix of 1024 × 1024 without any structure, the worst there is: what training meets is measured, not stated."""
        size = 1024
        captured = min(1.0, self.rank * 4 / size)  # the largest singular values of a random square matrix are twice its root mean square
        return CodecSpec(
            name=self.text, bits=16 * 2 * self.rank / size, memory_passes=25 + 1.5 * self.rank, relative_error=math.sqrt(1 - captured)
        )

    def _ordinary_header(self, shape: tuple[int, ...], dtype: str) -> Header | None:
        if len(shape) < 2:
            return None
        rows, columns = _matrix_shape(shape)
        if max(rows, columns) > _MAX_SIDE:
            return None
        return Header(codec=self.name, dtype=dtype, shape=shape, rank=min(self.rank, rows, columns))

    def _encode(self, header: Header, given: Given) -> tuple[Header, dict[str, torch.Tensor]]:
        tensor, feedback = given.tensor, given.feedback
        matrix = tensor.view(_matrix_shape(header.shape))
        peak = float(torch.stack([chunk.abs().amax() for chunk in torch.split(tensor.view(-1), _CHUNK)]).amax())
        if not math.isfinite(peak):
            raise NonFiniteTensorError(
                f"low-rank: the tensor {list(header.shape)} has NaN or Inf; skip this step, or send it with a block-wise codec or none"
            )
        whole, basis = _Whole(matrix, peak), _first_basis(matrix.shape[1], header.rank, tensor.device)
        if feedback is not None and feedback.basis is not None and feedback.basis.shape == basis.shape:
            basis = torch.where(feedback.basis.any(0), feedback.basis, basis)  # a direction that died out starts anew
        else:  # from nowhere one step finds little
            basis = _per_column(whole.transposed(_directions(whole, basis)[0]))
        left, unit = _directions(whole, basis)
        sums = whole.transposed(left)
        right, right_unit = _common(sums)
        if feedback is not None:
            feedback.basis = _per_column(sums)
        header = msgspec.structs.replace(header, scale=math.ldexp(unit * unit * right_unit, whole.exponent))
        return header, {"left": left.to(torch.int16), "right": right.to(torch.int16)}

    @classmethod
    def parts(cls, header: Header) -> tuple[EncodedPart, ...]:
        if len(header.shape) < 2:
            raise CodecError(f"low-rank: a header has the shape {list(header.shape)}, which is no matrix")
        rows, columns = _matrix_shape(header.shape)
        if not 0 <= header.rank <= min(rows, columns, _MAX_RANK):
            raise CodecError(f"low-rank: a header has rank {header.rank} for a matrix of {rows} × {columns}")
        if not math.isfinite(header.scale):
            raise CodecError(f"low-rank: a header has the scale {header.scale}")
        return (EncodedPart("left", torch.int16, rows * header.rank), EncodedPart("right", torch.int16, columns * header.rank))

    @classmethod
    def decode_flat(cls, header: Header, parts: Parts, flat: torch.Tensor) -> None:
        if not flat.is_floating_point():
            raise CodecError(f"low-rank: a header announces {header.dtype}, which travels as it is")
        rows, columns = _matrix_shape(header.shape)
        left = parts["left"].view(rows, header.rank).to(torch.float64)
        right = parts["right"].view(columns, header.rank).to(torch.float64).T.contiguous()
        at_once, limit = max(1, _CHUNK // columns), torch.finfo(flat.dtype).max
        for out, some in zip(torch.split(flat.view(rows, columns), at_once), torch.split(left, at_once), strict=True):
            product = torch.mm(some, right).mul_(header.scale)  # whole numbers below 2⁵³: exact in any order
            out.copy_(product.clamp_(-limit, limit))  # the nearest matrix of low rank may reach beyond a type's range


class _Whole:
    """A matrix in whole numbers times 2 to the exponent, with as many bits as sums over its rows or columns leave to fp64."""

    def __init__(self, matrix: torch.Tensor, peak: float) -> None:
        self.matrix = matrix
        bits = min(24, 53 - 15 - math.ceil(math.log2(max(matrix.shape))))
        self.exponent = max(-1000, math.frexp(peak)[1] - bits)

    def times(self, basis: torch.Tensor) -> torch.Tensor:
        """The whole numbers times a (columns, rank) matrix of whole numbers: (rows, rank), exact."""
        across = basis.T.contiguous()
        return torch.cat([torch.mm(across, numbers.T) for numbers in self._chunks()], 1).T

    def transposed(self, left: torch.Tensor) -> torch.Tensor:
        """The whole numbers, transposed, times a (rows, rank) matrix of whole numbers: (columns, rank), exact."""
        sums = left.new_zeros(left.shape[1], self.matrix.shape[1])
        start = 0
        for numbers in self._chunks():
            sums += torch.mm(left[start : start + len(numbers)].T, numbers)
            start += len(numbers)
        return sums.T

    def _chunks(self) -> Iterator[torch.Tensor]:
        """Some rows at a time in whole numbers, valid until the next."""
        unit = math.ldexp(1.0, -self.exponent)  # a power of two: the product is exact
        narrow = self.matrix.dtype == torch.float32 and abs(self.exponent) < 120  # then fp32 holds the unit and the whole numbers
        rows = max(1, _CHUNK // self.matrix.shape[1])
        wide = self.matrix.new_empty((rows, self.matrix.shape[1]), dtype=torch.float64)
        short = torch.empty_like(wide, dtype=torch.float32) if narrow else wide
        for some in torch.split(self.matrix, rows):
            numbers = wide[: len(some)]
            if narrow:
                yield numbers.copy_(torch.mul(some, unit, out=short[: len(some)]).round_())
            else:
                yield numbers.copy_(some).mul_(unit).round_()


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _first_basis(columns: int, rank: int, device: torch.device) -> torch.Tensor:
    """(columns, rank) whole numbers that look random and are the same everywhere: the high bits of a multiplicative hash."""
    numbers = torch.arange(1, columns * rank + 1, device=device) * -7046029254386353131
    numbers = (numbers ^ (numbers >> 29)) * -4658895280553007687
    return (numbers >> 48).clamp_(-_FACTOR, _FACTOR).to(torch.float64).view(columns, rank)


def _directions(whole: _Whole, basis: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Orthogonal columns that span what the matrix makes of the basis: whole numbers (rows, rank) and their unit."""
    return _common(_orthogonal(_per_column(whole.times(basis))))


def _per_column(values: torch.Tensor) -> torch.Tensor:
    """Every column stretched to whole numbers of its own unit."""
    peaks = values.abs().amax(0)
    return (values / torch.where(peaks == 0, 1.0, peaks) * _FACTOR).round_()


def _common(values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Whole numbers of one unit for all columns, and the unit."""
    unit = float(values.abs().amax()) / _FACTOR
    return ((values / unit).round_(), unit) if unit else (values, 0.0)


def _orthogonal(columns: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns with the same span, zeros for those that depend on earlier ones.

    Products of columns are exact; from there on every number is computed by the same elementary operations in the same order.
    """
    lower = _cholesky(torch.mm(columns.T, columns).tolist())
    found: list[torch.Tensor] = []
    for j, row in enumerate(lower):
        column = columns[:, j].clone()
        for i in range(j):
            column -= found[i] * row[i]
        found.append(column / row[j] if row[j] else column.zero_())
    return torch.stack(found, 1)


def _cholesky(products: list[list[float]]) -> list[list[float]]:
    """The lower triangle L with L·Lᵀ the given matrix; 0 on the diagonal where a row depends on earlier ones."""
    lower: list[list[float]] = []
    for j, row in enumerate(products):
        current: list[float] = []
        for i in range(j):
            rest = row[i] - sum(a * b for a, b in zip(current, lower[i], strict=False))
            current.append(rest / lower[i][i] if lower[i][i] else 0.0)
        rest = row[j] - sum(a * a for a in current)
        current.append(math.sqrt(rest) if rest > 1e-9 * row[j] else 0.0)
        lower.append(current)
    return lower
