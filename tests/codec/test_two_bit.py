"""2-bit and top-k-2-bit against a reference written with plain numbers; what loses much keeps its debt bounded."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.codec.base import Encoded, ErrorFeedback
from atoll.codec.registry import decode, make_codec, parts_of
from atoll.codec.two_bit import SparseTwoBit
from atoll.errors import CodecError, NonFiniteTensorError
from tests.codec.tensors import FLOATS, tensors


def quantised(values: list[float], larger_than: float) -> list[float]:
    """Each as the mean magnitude of the smaller or the larger ones, with its sign."""
    mean = sum(map(abs, values)) / len(values)
    groups: dict[bool, list[float]] = {True: [], False: []}
    for value in values:
        groups[abs(value) > larger_than * mean].append(abs(value))
    means = {larger: sum(group) / len(group) if group else 0.0 for larger, group in groups.items()}
    return [(-1 if value < 0 else 1) * means[abs(value) > larger_than * mean] for value in values]


@pytest.mark.parametrize("elements", [256, 1000, 131_072 + 5])
def test_two_bits_are_the_sign_and_the_mean_of_the_smaller_or_the_larger_ones(elements: int) -> None:
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(elements)) ** 3
    found = decode(make_codec("2-bit").encode(tensor))
    for number in (0, elements // 256 // 2, (elements - 1) // 256):
        block = torch.nn.functional.pad(tensor, (0, -elements % 256))[256 * number : 256 * (number + 1)]
        expected = torch.tensor(quantised(block.tolist(), 1.25))[: elements - 256 * number]
        got = found[256 * number : 256 * (number + 1)]
        near = (got - expected).abs() <= 2**-8 * expected.abs() + 2e-4 * block.abs().max()
        assert int((~near).sum()) <= 1  # one within a rounding of the border between the groups may be in the other
        assert bool((got * block[: len(got)] >= 0).all())


@given(tensors(), st.sampled_from([1, 64, 1500, 4096]))
def test_exactly_the_largest_of_each_block_arrive(tensor: torch.Tensor, kept: int) -> None:
    flat = tensor.reshape(-1)
    encoded = SparseTwoBit(kept).encode(tensor)
    if encoded.header.codec == "none":
        return
    decoded = decode(encoded).reshape(-1)
    for before, after in zip(flat.split(4096), decoded.split(4096), strict=True):
        several = -(-kept * len(before) // 4096)
        order = torch.sort(before.double().abs(), descending=True, stable=True).indices
        assert bool((after[order[several:]] == 0).all())
        assert bool((after[order[:several]].double() * before[order[:several]].double() >= 0).all())
        assert float(after.double().abs().max()) <= float(before.double().abs().max()) * (1 + 2**-8)


def test_among_equals_the_first_are_kept_and_blocks_do_not_mix() -> None:
    tensor = torch.ones(2 * 4096 + 1000)
    tensor[4096:8192] *= -3
    found = decode(SparseTwoBit(64).encode(tensor))
    assert found.nonzero().view(-1).tolist() == [*range(64), *range(4096, 4160), *range(8192, 8192 + 16)]
    assert set(found.tolist()) == {0.0, 1.0, -3.0}


def test_sparse_updates_are_a_hundred_and_forty_first() -> None:
    encoded = make_codec("top-k-2-bit:64").encode(torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)))
    assert 140 < 1 / encoded.ratio < 142


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sparse_updates_that_are_not_finite_are_refused(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(9000, dtype=dtype)
    tensor[8999] = bad
    feedback = ErrorFeedback()
    with pytest.raises(NonFiniteTensorError, match="NaN or Inf"):
        SparseTwoBit(64).encode(tensor, feedback=feedback)
    assert feedback.residual is None


def test_places_beyond_a_block_or_out_of_order_are_refused() -> None:
    encoded = SparseTwoBit(2).encode(torch.arange(3000.0))
    assert [part.name for part in parts_of(encoded.header)] == ["levels", "index", "codes"]
    for index in ([0xFF, 0xFF, 0xFF], [5, 0x50, 0], [6, 0x50, 0]):
        parts = [encoded.parts[0], torch.tensor(index, dtype=torch.uint8), encoded.parts[2]]
        with pytest.raises(CodecError, match="not ascending or beyond"):
            decode(Encoded(encoded.header, parts))


@pytest.mark.parametrize("text", ["2-bit", "top-k-2-bit:64"])
def test_with_feedback_everything_arrives_in_the_end(text: str) -> None:
    codec, feedback = make_codec(text), ErrorFeedback()
    generator = torch.Generator().manual_seed(2)
    sent, arrived = torch.zeros(8192), torch.zeros(8192)
    steady = torch.randn(8192, generator=generator)
    debts = []
    for _ in range(200):
        tensor = steady + 0.5 * torch.randn(8192, generator=generator)
        sent += tensor
        arrived += decode(codec.encode(tensor, feedback=feedback))
        debts.append(float((sent - arrived).norm() / tensor.norm()))
    assert feedback.residual is not None
    assert torch.allclose(sent - arrived, feedback.residual, atol=1e-3)
    assert max(debts[100:]) < 1.25 * max(debts[50:100])  # it does not grow
    assert float((sent - arrived).norm() / sent.norm()) < (0.03 if text == "2-bit" else 0.3)
