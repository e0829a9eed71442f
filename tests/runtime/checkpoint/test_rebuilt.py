"""Digests of weights that no checkpoint stores: the same under every division, another for every other content."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.errors import CheckpointError, RebuiltWeightsError
from atoll.runtime.checkpoint.local_shard import Piece
from atoll.runtime.checkpoint.rebuilt import check_rebuilt, own_digests, tensor_digests
from atoll.runtime.checkpoint.rectangles import split_longest, whole

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]


def digest(value: Tensor) -> str:
    return tensor_digests({"x": value})["x"].digest


def tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return (drawn * 3).to(dtype) if dtype is not torch.bool else drawn > 0


@settings(max_examples=60)
@given(st.integers(0, 99), st.sampled_from(DTYPES), st.lists(st.integers(1, 9), max_size=3), st.integers(1, 5), st.integers(1, 4))
def test_parts_add_up_to_the_whole(seed: int, dtype: torch.dtype, sizes: list[int], first: int, second: int) -> None:
    value = tensor(seed, dtype, tuple(sizes))
    parts = [part for outer in split_longest(whole(value.shape), first) for part in split_longest(outer, second)]
    pieces = [Piece("x", tuple(value.shape), part, value[part.slices()]) for part in parts]
    said = [own_digests([piece]).get("x", 0) for piece in pieces]
    assert f"{sum(said) % 2**64:016x}" == digest(value) == digest(value.clone())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    value = tensor(1, dtype, (3, 4))
    known = {digest(value)}
    if dtype is not torch.bool:
        raw = value.view(torch.uint8)
        for place in range(raw.numel()):
            for bit in range(8):
                changed = value.clone()
                changed.view(torch.uint8).view(-1)[place] ^= 1 << bit
                known.add(digest(changed))
        assert len(known) == 1 + 8 * raw.numel()
    assert digest(value.flip(0)) != digest(value)
    assert digest(value.t().contiguous()) != digest(value)


def test_a_tensor_larger_than_a_block() -> None:
    value = tensor(2, torch.float32, (3, 300_000))
    flat = value.reshape(-1)
    assert digest(flat) == digest(flat.reshape(900, 1000).reshape(-1))
    assert digest(flat) == digest(value), "places are counted in the order of the numbers"
    changed = value.clone()
    changed[2, 299_999] = 0
    assert digest(changed) != digest(value)


def test_what_differs_is_named() -> None:
    made = tensor_digests({"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(2)})
    check_rebuilt("here", made, made)
    with pytest.raises(RebuiltWeightsError, match=r"here: .*'b' and 1 more came out otherwise"):
        check_rebuilt("here", made, tensor_digests({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"'a' has the shape \[2\] there and \[3\] in the job"):
        check_rebuilt("here", made, tensor_digests({"a": torch.zeros(3)}))
