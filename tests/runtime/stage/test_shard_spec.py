"""Holdings: what is taken from a whole tensor and put back into it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.stage.shard_spec import ShardSpec


@st.composite
def holdings(draw: st.DrawFn) -> ShardSpec:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    if draw(st.booleans()):
        return ShardSpec(name="w", shape=shape)
    dim = draw(st.integers(0, len(shape) - 1))
    bounds = sorted(draw(st.sets(st.integers(0, shape[dim]), max_size=4)))
    return ShardSpec(name="w", shape=shape, dim=dim, parts=tuple(zip(bounds[::2], bounds[1::2], strict=False)) or ((0, 0),))


@given(holdings())
def test_what_is_taken_goes_back_to_its_place(holding: ShardSpec) -> None:
    whole = torch.arange(torch.Size(holding.shape).numel(), dtype=torch.float32).view(holding.shape)
    part = holding.take(whole)
    assert tuple(part.shape) == holding.local_shape
    assert part.numel() == holding.elements
    found = torch.full(holding.shape, -1.0)
    holding.put(found, part)
    here = found >= 0
    assert int(here.sum()) == holding.elements
    assert torch.equal(found[here], whole[here])


def test_fused_projections_are_taken_block_by_block() -> None:
    query_key_value = torch.arange(12.0)
    holding = ShardSpec(name="w", shape=(12,), dim=0, parts=((2, 4), (6, 8), (10, 12)))
    assert holding.take(query_key_value).tolist() == [2, 3, 6, 7, 10, 11]


@given(holdings())
def test_all_of_it_or_one_range_is_a_view(holding: ShardSpec) -> None:
    whole = torch.zeros(holding.shape)
    shares_memory = holding.take(whole).untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert shares_memory == (len(holding.parts) <= 1)
