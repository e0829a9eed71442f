"""Error feedback: nothing is lost for good."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.codec.base import ErrorFeedback
from atoll.codec.registry import decode, make_codec, relative_error
from atoll.errors import CodecError
from tests.codec.tensors import CODEC_TEXTS


@given(st.sampled_from(CODEC_TEXTS), st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_what_arrived_and_what_is_owed_is_what_was_given(text: str, seed: int, dtype: torch.dtype) -> None:
    generator, feedback = torch.Generator().manual_seed(seed), ErrorFeedback()
    given_sum = torch.zeros(40, 50, dtype=torch.float64)
    arrived = torch.zeros_like(given_sum)
    for _ in range(5):
        tensor = torch.randn(40, 50, generator=generator).to(dtype)
        given_sum += tensor
        arrived += decode(make_codec(text).encode(tensor, feedback=feedback))
    assert feedback.residual is not None
    assert relative_error(given_sum, arrived + feedback.residual) < 1e-5


@pytest.mark.parametrize("text", ["bf16", "int8", "int4", "top-k:0.05"])
def test_sums_converge_to_the_true_sum(text: str) -> None:
    """The error of the mean falls like one over the number of steps; without feedback it stays."""
    codec, feedback = make_codec(text), ErrorFeedback()
    tensor = torch.randn(64, 48, generator=torch.Generator().manual_seed(6))
    alone = relative_error(tensor, decode(codec.encode(tensor)))
    total, errors = torch.zeros(64, 48, dtype=torch.float64), {}
    for step in range(1, 401):
        total += decode(codec.encode(tensor, feedback=feedback))
        errors[step] = relative_error(tensor, (total / step).float())
    assert errors[400] < alone / 20
    assert errors[400] < 0.4 * errors[100]


@pytest.mark.parametrize("text", ["bf16", "int8", "int4", "none"])
def test_non_finite_values_are_sent_once_and_not_owed(text: str) -> None:
    feedback, tensor = ErrorFeedback(), torch.randn(1000, generator=torch.Generator().manual_seed(8))
    tensor[3], tensor[900] = float("nan"), float("inf")
    arrived = decode(make_codec(text).encode(tensor, feedback=feedback))
    assert arrived[3].isnan()
    assert arrived[900].isinf()
    assert bool(decode(make_codec(text).encode(torch.ones(1000), feedback=feedback)).isfinite().all())


def test_sums_beyond_fp16_are_cut_and_the_rest_is_owed() -> None:
    feedback = ErrorFeedback()
    tensor = torch.full((1000,), 60000.0, dtype=torch.float16)
    make_codec("top-k:0.25").encode(tensor, feedback=feedback)
    arrived = decode(make_codec("top-k:0.25").encode(tensor, feedback=feedback))
    assert float(arrived.max()) == 65504
    assert feedback.residual is not None
    assert feedback.residual[:500].unique().tolist() == [54496, 60000]  # the first quarter was sent whole at first, the second one cut now


def test_feedback_of_another_tensor_is_refused() -> None:
    feedback = ErrorFeedback()
    make_codec("int8").encode(torch.ones(1000), feedback=feedback)
    with pytest.raises(CodecError, match="for each peer and tensor"):
        make_codec("int8").encode(torch.ones(1001), feedback=feedback)
