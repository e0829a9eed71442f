"""A random operator on some rows of a micro-batch gives the rows it would give of all, bit for bit, wherever samples are counted."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.runtime.stage.rng import Draw, DrawKey
from atoll.runtime.stage.row_draws import RowDraw, Rows

aten = torch.ops.aten


def made(operator: Any, dims: tuple[int | None, ...], arguments: tuple[Any, ...], start: int, stop: int) -> Any:
    """By the rows from `start` to `stop`."""
    total = next(value.shape[dim] for value, dim in zip(arguments, dims, strict=True) if dim is not None)
    rows = Rows(start, total)
    draw = RowDraw(operator, 3, Draw(DrawKey(7), torch.device("cpu")), rows, threading.Lock(), dims)
    pieces = [value if dim is None else value.narrow(dim, start, stop - start) for value, dim in zip(arguments, dims, strict=True)]
    return draw(*pieces)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_rows_are_those_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    stop = data.draw(st.integers(start + 1, shape[dim]))
    value = torch.randn([shape[at] for at in order]).permute([order.index(at) for at in range(len(shape))])
    assert list(value.shape) == shape
    operator, rest = data.draw(st.sampled_from([(aten.dropout.default, (0.4, True)), (aten.rand_like.default, ())]))
    dims = (dim, *(None for _ in rest))
    Draw(DrawKey(7), torch.device("cpu"))(3)
    whole = operator(value, *rest)
    assert torch.equal(made(operator, dims, (value, *rest), 0, shape[dim]), whole)
    assert torch.equal(made(operator, dims, (value, *rest), start, stop), whole.narrow(dim, start, stop - start))


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 5), (4, 5)])
def test_attention_draws_for_every_sample_and_gradients_reach_the_rows_only(start: int, stop: int) -> None:
    values = [torch.randn(5, 2, 3, 4, requires_grad=True) for _ in range(3)]
    arguments, dims = (*values, None, 0.3), (0, 0, 0, None, None)
    attention = aten.scaled_dot_product_attention.default
    whole = made(attention, dims, arguments, 0, 5)[start:stop]
    found = made(attention, dims, arguments, start, stop)
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
    towards = torch.randn_like(whole)
    expected: tuple[Tensor, ...] = torch.autograd.grad(whole, values, towards)
    for one, other in zip(torch.autograd.grad(found, values, towards), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_returns_several_values_gives_the_rows_of_each() -> None:
    value = torch.randn(6, 3)
    whole = made(aten.native_dropout.default, (0, None, None), (value, 0.5, True), 0, 6)
    found = made(aten.native_dropout.default, (0, None, None), (value, 0.5, True), 2, 5)
    assert all(torch.equal(one, other[2:5]) for one, other in zip(found, whole, strict=True))
