"""Top-k: exactly the largest, their exact values, and everything in the end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.codec.base import ErrorFeedback
from atoll.codec.registry import decode
from atoll.codec.top_k import TopK
from atoll.errors import NonFiniteTensorError
from tests.codec.tensors import tensors


def reference(flat: torch.Tensor, kept: int) -> set[int]:
    """Indices of the largest magnitudes, the lowest first among equals."""
    magnitudes = flat.abs().double().tolist()
    return set(sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))[:kept])


@given(tensors(), st.sampled_from([0.01, 0.05, 0.3, 0.5]))
def test_exactly_the_k_largest_arrive_unchanged(tensor: torch.Tensor, share: float) -> None:
    encoded = TopK(share).encode(tensor)
    decoded, flat = decode(encoded).reshape(-1), tensor.reshape(-1)
    if encoded.header.codec == "none":
        assert torch.equal(decoded, flat)
        return
    assert encoded.header.kept == max(1, round(share * flat.numel()))
    chosen = reference(flat, encoded.header.kept)
    for i in range(flat.numel()):
        assert decoded[i] == (flat[i] if i in chosen else 0)


@pytest.mark.parametrize("distinct", [1, 2, 50, None])
def test_large_tensors_with_equal_values_keep_exactly_k(distinct: int | None) -> None:
    """Long enough that the threshold is guessed from a sample, which equal values and sorted values mislead."""
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(4))
    tensor = values.sort().values if distinct is None else (values * distinct).round() + distinct
    encoded = TopK(0.01).encode(tensor)
    assert encoded.header.kept == 3000
    expected = torch.zeros_like(tensor)
    order = torch.sort(tensor.abs(), descending=True, stable=True).indices[:3000]
    expected[order] = tensor[order]
    assert torch.equal(decode(encoded), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_and_leaves_the_feedback_alone(bad: float) -> None:
    feedback, tensor = ErrorFeedback(), torch.randn(5000, generator=torch.Generator().manual_seed(5))
    TopK(0.1).encode(tensor, feedback=feedback)
    before = feedback.residual
    assert before is not None
    kept = before.clone()
    tensor[17] = bad
    with pytest.raises(NonFiniteTensorError, match="NaN or Inf"):
        TopK(0.1).encode(tensor, feedback=feedback)
    assert feedback.residual is not None
    assert torch.equal(feedback.residual, kept)
