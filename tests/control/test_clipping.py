"""One clip factor for all stages: that of PyTorch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.clipping import clip_coefficient, clip_or_skip, why_refused

numbers = st.floats(-1e3, 1e3, allow_nan=False)


@given(st.lists(st.lists(numbers, min_size=1, max_size=4), min_size=1, max_size=4), st.floats(1e-3, 1e3), st.floats(0.5, 64.0))
def test_the_factor_is_that_of_torch(stages: list[list[float]], max_norm: float, weight: float) -> None:
    """Stages report norms of undivided sums; torch clips the divided gradient of the whole."""
    sums = [torch.tensor(row, dtype=torch.float64) for row in stages]
    parameter = torch.zeros(sum(map(len, stages)), dtype=torch.float64, requires_grad=True)
    gradient = torch.cat(sums) / weight
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    factor, skipped = clip_or_skip([float(row.square().sum()) for row in sums], weight, max_norm)
    assert not skipped
    torch.testing.assert_close(factor * gradient, parameter.grad, rtol=1e-12, atol=1e-300)


def test_within_the_margin_of_the_limit_torch_clips_too() -> None:
    parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.ones(1, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    factor, _ = clip_or_skip([1.0], 1.0, 1.0)
    assert factor == parameter.grad.item() < 1.0


def test_without_a_bound_nothing_is_clipped() -> None:
    assert clip_coefficient(5.0, None) == 1.0
    assert clip_coefficient(5.0, 10.0) == 1.0
    assert clip_coefficient(5.0, 1.0) == pytest.approx(0.2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_skips_the_step(bad: float) -> None:
    assert clip_or_skip([1.0, bad], 4.0, 1.0) == (0.0, True)
    assert clip_or_skip([1.0], 0.0, None) == (0.0, True)
    assert clip_or_skip([1e300, 1e300], 1.0, None) == (1.0, False)


@pytest.mark.parametrize(
    ("loss", "weight", "norms", "skips", "expected"),
    [
        (6.0, 3.0, [1.0, 2.0], False, None),
        (math.nan, 3.0, [1.0], True, "loss"),
        (-math.inf, 3.0, [1.0], True, "loss"),
        (6.0, 0.0, [1.0], True, "weight"),
        (6.0, -1.0, [1.0], True, "weight"),
        (6.0, math.nan, [1.0], True, "weight"),
        (6.0, 3.0, [1.0, math.inf], False, "gradient"),
        (6.0, 3.0, [1.0, math.inf], True, None),
    ],
)
def test_steps_that_must_not_be_made(loss: float, weight: float, norms: list[float], skips: bool, expected: str | None) -> None:
    found = why_refused(loss, weight, norms, skips)
    assert (found[0] if found else None) == expected
