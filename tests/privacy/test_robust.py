"""Updates that cannot be meant are refused with their sender's name; what is left is bounded. Against NumPy and SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from atoll.errors import AtollError
from atoll.privacy.robust import clip_to_median, judge_updates, trimmed_mean


def honest(count: int, elements: int = 1000) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(count)
    common = torch.randn(elements, generator=made)
    return {f"s{number}": common + 0.3 * torch.randn(elements, generator=made) for number in range(count)}


def test_what_cannot_be_meant_is_refused_by_name() -> None:
    updates = honest(5)
    updates["nan"] = updates["s0"].clone()
    updates["nan"][[3, 5]] = math.nan
    updates["inf"] = updates["s0"].clone()
    updates["inf"][7] = -math.inf
    updates["short"] = torch.zeros(999)
    updates["half"] = updates["s0"].half()
    updates["huge"] = updates["s0"] * 1e20
    found = judge_updates(updates, (1000,), torch.float32)
    assert list(found.norms) == ["s0", "s1", "s2", "s3", "s4"]
    assert found.norms["s1"] == pytest.approx(np.linalg.norm(updates["s1"].double().numpy()), rel=1e-12)
    assert found.refused["nan"] == "the update of nan is not finite: 2 of 1000 values are NaN or infinite"
    assert found.refused["inf"].startswith("the update of inf is not finite: 1 of 1000")
    assert found.refused["short"] == "the update of short is [999] of torch.float32, and updates here are [1000] of torch.float32"
    assert "of torch.float16" in found.refused["half"]
    assert "the update of huge has a norm of" in found.refused["huge"]
    assert "times what is usual" in found.refused["huge"]


def test_a_norm_that_fp32_cannot_say_is_too_large_and_not_infinite() -> None:
    updates = {**honest(3), "large": torch.full((1000,), 3e38)}
    found = judge_updates(updates, (1000,), torch.float32)
    assert list(found.refused) == ["large"]
    assert "inf" not in found.refused["large"]


@pytest.mark.parametrize("liars", [1, 2])
@pytest.mark.parametrize("factor", [1e6, 0.0])
def test_fewer_than_half_cannot_have_honest_updates_refused(liars: int, factor: float) -> None:
    updates = honest(5)
    for number in range(liars):
        updates[f"s{number}"] = updates[f"s{number}"] * factor
    refused = judge_updates(updates, (1000,), torch.float32).refused
    assert set(refused) == ({f"s{number}" for number in range(liars)} if factor else set())


def test_of_two_nobody_is_too_large_but_by_what_was_usual_before() -> None:
    updates = {"a": torch.ones(10), "b": torch.ones(10) * 1000}
    assert not judge_updates(updates, (10,), torch.float32).refused
    assert set(judge_updates(updates, (10,), torch.float32, usual_norm=3.0).refused) == {"b"}
    standing_still = {name: torch.zeros(10) for name in "abc"} | {"d": torch.ones(10)}
    assert not judge_updates(standing_still, (10,), torch.float32).refused  # nothing is usual where nothing moves


def test_no_update_counts_for_more_than_the_median() -> None:
    updates = {**honest(4), "large": honest(4)["s0"] * 9}
    norms = judge_updates(updates, (1000,), torch.float32).norms
    factors = clip_to_median(norms)
    reference = np.median([np.linalg.norm(update.double().numpy()) for update in updates.values()])
    clipped = {name: np.linalg.norm(updates[name].double().numpy() * factor) for name, factor in factors.items()}
    assert max(clipped.values()) == pytest.approx(reference, rel=1e-9)
    assert clipped["large"] == pytest.approx(reference, rel=1e-9)
    assert sum(factor == 1.0 for factor in factors.values()) == 3
    assert clip_to_median({}) == {}
    assert clip_to_median({"a": 1.0, "b": 4.0}) == {"a": 1.0, "b": 0.25}  # of two the smaller


@pytest.mark.parametrize(("count", "trim"), [(3, 1), (5, 1), (5, 2), (7, 3), (4, 0)])
def test_the_trimmed_mean_is_scipys(count: int, trim: int) -> None:
    updates = honest(count, 300_000 if count == 3 else 1000)
    found = trimmed_mean(updates, dict.fromkeys(updates, 7.0), trim)
    stacked = np.stack([update.double().numpy() for update in updates.values()])
    expected = stats.trim_mean(stacked, (trim + 0.25) / count, axis=0)
    assert np.abs(found.double().numpy() - expected).max() < 1e-6


def test_what_is_left_is_weighed() -> None:
    updates = honest(5, 64)
    weights = {name: float(number + 1) for number, name in enumerate(updates)}
    found = trimmed_mean(updates, weights, 1)
    for element in range(64):
        ordered = sorted((float(update[element]), weights[name]) for name, update in updates.items())[1:-1]
        expected = sum(value * weight for value, weight in ordered) / sum(weight for _, weight in ordered)
        assert float(found[element]) == pytest.approx(expected, abs=1e-6)


def test_whoever_lies_stays_between_honest_values() -> None:
    updates = honest(5)
    low = np.min([update.numpy() for update in updates.values()], axis=0)
    high = np.max([update.numpy() for update in updates.values()], axis=0)
    updates |= {"liar": torch.full((1000,), 1e30), "another": torch.full((1000,), -1e30)}
    weights = dict.fromkeys(updates, 1.0) | {"liar": 1e12, "another": 1e12}
    found = trimmed_mean(updates, weights, 2).numpy()
    assert (found >= low).all()
    assert (found <= high).all()
    assert trimmed_mean({name: update.view(10, 100) for name, update in updates.items()}, weights, 2).shape == (10, 100)


def test_what_cannot_be_trimmed_or_weighed_is_refused() -> None:
    with pytest.raises(AtollError, match="of 4 updates the 2 smallest and largest cannot be left out: it takes 5 or more"):
        trimmed_mean(honest(4), dict.fromkeys(honest(4), 1.0), 2)
    with pytest.raises(AtollError, match="weighed by positive numbers"):
        trimmed_mean(honest(3), {"s0": 1.0, "s1": 0.0, "s2": 1.0}, 1)
