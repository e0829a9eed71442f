"""Low rank: as good as the best approximation of that rank once it has run a while; refused where it would spread NaN."""

import pytest
import torch

from atoll.codec.base import ErrorFeedback
from atoll.codec.low_rank import LowRank
from atoll.codec.registry import decode, relative_error
from atoll.errors import NonFiniteTensorError


def matrix(rows: int, columns: int, rank: int, noise: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns + rank)
    product = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
    return product + noise * torch.randn(rows, columns, generator=generator)


@pytest.mark.parametrize("shape", [(60, 200), (200, 60), (40, 6, 30)])
def test_a_matrix_of_that_rank_arrives_almost_exactly(shape: tuple[int, ...]) -> None:
    tensor = matrix(shape[0], torch.Size(shape[1:]).numel(), 3, 0.0).view(shape)
    encoded = LowRank(3).encode(tensor)
    assert encoded.header.codec == "low-rank"
    assert relative_error(tensor, decode(encoded)) < 3e-4


def test_it_comes_close_to_the_best_there_is() -> None:
    tensor = matrix(300, 200, 4, 0.3)
    singular = torch.linalg.svdvals(tensor)
    best = float(singular[4:].square().sum().sqrt() / singular.square().sum().sqrt())
    assert relative_error(tensor, decode(LowRank(4).encode(tensor))) < 1.02 * best


def test_directions_carry_on_from_step_to_step() -> None:
    """With the basis kept, one multiplication a step finds what a fresh start of one multiplication does not."""
    feedback, tensor = ErrorFeedback(), matrix(300, 200, 40, 0.0)
    first = relative_error(tensor, decode(LowRank(4).encode(tensor)))
    for _ in range(6):
        LowRank(4).encode(tensor, feedback=feedback)
        feedback.residual = None  # the directions alone
    assert relative_error(tensor, decode(LowRank(4).encode(tensor, feedback=feedback))) < first


@pytest.mark.parametrize("fill", [0.0, 2.5, 1e-42, 3e38])
def test_matrices_of_equal_values_have_rank_one(fill: float) -> None:
    tensor = torch.full((64, 64), fill)
    decoded = decode(LowRank(2).encode(tensor))
    assert bool(decoded.isfinite().all())
    assert torch.allclose(decoded, tensor, rtol=1e-3, atol=1e-44)


def test_vectors_travel_as_they_are() -> None:
    tensor = torch.randn(5000)
    encoded = LowRank(2).encode(tensor)
    assert encoded.header.codec == "none"
    assert torch.equal(decode(encoded), tensor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_and_leaves_the_feedback_alone(bad: float) -> None:
    feedback, tensor = ErrorFeedback(), torch.randn(50, 60, generator=torch.Generator().manual_seed(5))
    LowRank(2).encode(tensor, feedback=feedback)
    basis, residual = feedback.basis, feedback.residual
    assert residual is not None
    kept = residual.clone()
    tensor[1, 7] = bad
    with pytest.raises(NonFiniteTensorError, match="NaN or Inf"):
        LowRank(2).encode(tensor, feedback=feedback)
    assert feedback.basis is basis
    assert feedback.residual is not None
    assert torch.equal(feedback.residual, kept)
