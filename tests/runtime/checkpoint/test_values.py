"""Small values survive JSON exactly, and nothing else gets through."""

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.values import from_plain, to_plain

_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
_values = st.recursive(
    _leaves, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(_keys, inner, max_size=4), max_leaves=20
)


def _through_json(value: object) -> Any:
    return from_plain(msgspec.json.decode(msgspec.json.encode(to_plain(value, "value"))), "value")


@given(_values)
def test_a_round_trip(value: object) -> None:
    assert _through_json(value) == value
    assert repr(_through_json(value)) == repr(value), "tuples stay tuples, 1 stays 1"


def test_what_json_has_no_words_for() -> None:
    assert math.isnan(_through_json(math.nan))
    assert _through_json([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert _through_json(Counter([3, 3, 5])) == Counter([3, 3, 5])
    assert _through_json(deque([1, 2])) == deque([1, 2])
    assert _through_json({1, 2}) == {1, 2}
    assert _through_json(torch.bfloat16) is torch.bfloat16
    assert _through_json(torch.device("cpu")) == torch.device("cpu")
    assert _through_json(random.getstate()) == random.getstate()
    assert _through_json(np.float32(0.1)) == np.float32(0.1)
    state = np.random.default_rng(3).bit_generator.state
    assert _through_json(state) == state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).to(dtype)
    again = _through_json(value)
    assert torch.equal(again, value)
    assert again.dtype == dtype
    assert again.shape == value.shape


_SCHEDULERS: list[Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = [
    lambda o: lr_scheduler.StepLR(o, 2),
    lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]),
    lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
    lambda o: lr_scheduler.PolynomialLR(o),
]


@pytest.mark.parametrize("build", _SCHEDULERS)
def test_schedules_go_on_where_they_were(build: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]) -> None:
    def start() -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3, momentum=0.9)
        return optimizer, build(optimizer)

    def advance(optimizer: torch.optim.Optimizer, schedule: lr_scheduler.LRScheduler, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    optimizer, schedule = start()
    advance(optimizer, schedule, 3)
    other, resumed = start()
    resumed.load_state_dict(_through_json(schedule.state_dict()))
    other.param_groups[0].update(_through_json({k: v for k, v in optimizer.param_groups[0].items() if k != "params"}))
    assert advance(other, resumed, 4) == advance(optimizer, schedule, 4)


@pytest.mark.parametrize("value", [object(), lambda: 0, {"a": [print]}, torch.zeros(2**20)])
def test_what_cannot_be_saved(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"^extra"):
        to_plain(value, "extra")


@pytest.mark.parametrize("text", ['{"$call": "os.system"}', '{"$dtype": "save"}', '{"$tensor": 3}', '{"$int": "x"}', '{"$dict": [1]}'])
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"^state.json"):
        from_plain(msgspec.json.decode(text), "state.json")
