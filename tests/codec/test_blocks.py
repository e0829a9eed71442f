"""bf16, fp16, int8, int4 and 2-bit: error bounds per block, and blocks that travel exactly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.codec.registry import decode, make_codec
from tests.codec.tensors import FLOATS, tensors

BLOCKWISE = ("bf16", "fp16", "int8", "int4", "2-bit")


def bound(name: str, block: torch.Tensor) -> torch.Tensor:
    """The largest error docs/codecs.md allows for each element of a block (fp64)."""
    peak = block.abs().max()
    if name == "int8":
        return (peak / 254 * (1 + 2**-16)).expand_as(block)
    if name == "int4":
        return (peak / 14 * (1 + 2**-16)).expand_as(block)
    if name == "2-bit":
        return (peak * 1.01).expand_as(block)
    if name == "bf16":
        return (block.abs() * 2**-8).clamp_min(2.0**-134)
    return (block.abs() * 2**-11).clamp_min(2.0**-25)


@given(tensors(finite=False), st.sampled_from(BLOCKWISE))
def test_every_element_is_within_the_bound_of_its_block_and_non_finite_ones_are_exact(tensor: torch.Tensor, name: str) -> None:
    encoded = make_codec(name).encode(tensor)
    decoded = decode(encoded)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == tensor.dtype
    before, after = tensor.reshape(-1).double(), decoded.reshape(-1).double()
    for x, y in zip(before.split(256), after.split(256), strict=True):
        if not x.numel():
            continue
        if not x.isfinite().all():
            assert torch.equal(x.nan_to_num(nan=1e-300), y.nan_to_num(nan=1e-300))  # the whole block is as it was
            continue
        kind = torch.finfo(tensor.dtype)
        rounding = x.abs().max() * kind.eps / 2 + kind.smallest_normal * kind.eps  # of the decoded tensor's own type
        assert bool(((x - y).abs() <= bound(name, x) + rounding).all())


@pytest.mark.parametrize("name", BLOCKWISE)
def test_one_bad_value_makes_one_block_exact_and_no_other_worse(name: str) -> None:
    clean = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    spoiled = clean.clone()
    spoiled[70_000] = float("nan")
    spoiled[199_999] = float("inf")  # in the last block, which is not full
    encoded = make_codec(name).encode(spoiled)
    assert encoded.header.exact_blocks == 2
    got, reference = decode(encoded), decode(make_codec(name).encode(clean))
    for block in range(782):
        part = slice(256 * block, 256 * (block + 1))
        expected = spoiled if block in (70_000 // 256, 781) else reference
        assert torch.equal(got[part].nan_to_num(7.0), expected[part].nan_to_num(7.0))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("value", [1e-45, 1e-38, 1e-31, 3.4e38, 1e38])
def test_blocks_whose_scale_no_float_holds_are_exact(name: str, value: float) -> None:
    tensor = torch.full((1024,), value)
    encoded = make_codec(name).encode(tensor)
    assert encoded.header.exact_blocks == 4
    assert torch.equal(decode(encoded), tensor)


def test_halves_do_not_turn_large_values_into_infinity() -> None:
    tensor = torch.ones(1024)
    tensor[300] = 1e6
    encoded = make_codec("fp16").encode(tensor)
    assert encoded.header.exact_blocks == 1
    assert torch.equal(decode(encoded), tensor)
    tensor[300] = torch.finfo(torch.float32).max
    assert torch.equal(decode(make_codec("bf16").encode(tensor)), tensor)


@pytest.mark.parametrize("name", BLOCKWISE)
def test_zeros_cost_no_exact_blocks_and_come_back_as_zeros(name: str) -> None:
    encoded = make_codec(name).encode(torch.zeros(3000))
    assert encoded.header.exact_blocks == 0
    assert torch.equal(decode(encoded), torch.zeros(3000))


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_and_int4_keep_integers_that_fit(dtype: torch.dtype) -> None:
    for name, largest in (("int8", 127), ("int4", 7)):
        tensor = torch.arange(-largest, largest + 1).repeat(40)[:1024].to(dtype)
        tensor[::64] = largest  # every block reaches the largest
        assert torch.equal(decode(make_codec(name).encode(tensor)), tensor)


@pytest.mark.parametrize("elements", [512 * 256 - 1, 512 * 256, 512 * 256 + 1, 3 * 512 * 256 + 77])
@pytest.mark.parametrize("name", BLOCKWISE)
def test_chunks_are_an_implementation_detail(name: str, elements: int) -> None:
    """Encoding a large tensor is encoding its blocks one by one."""
    codec, tensor = make_codec(name), torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    whole = decode(codec.encode(tensor))
    start = max(0, 512 * 256 - 1024) // 256 * 256
    some = tensor[start : start + 2048]
    assert torch.equal(decode(codec.encode(some)), whole[start : start + 2048])
    rest = tensor[elements // 256 * 256 - 512 :]
    assert torch.equal(decode(codec.encode(rest)), whole[elements // 256 * 256 - 512 :])
