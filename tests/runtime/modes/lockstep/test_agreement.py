"""Ranks that do not train the same job are told apart before the first step."""

import msgspec
import pytest
import torch
from torch import nn

from atoll.runtime.modes.lockstep.agreement import Said, difference, digest_of_weights

SAID = Said(
    steps=10,
    batch_size=8,
    seed=0,
    samples=64,
    order="1, 2",
    precision="fp32",
    max_grad_norm=None,
    eval_every=None,
    optimizer="AdamW{'lr': 0.001}",
    weights="abc",
    callbacks=False,
)


def test_equal_jobs_agree() -> None:
    assert difference([SAID, SAID, SAID]) is None


def test_callbacks_may_be_on_some_ranks_only() -> None:
    assert difference([msgspec.structs.replace(SAID, callbacks=True), SAID]) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 12),
        ("seed", 1),
        ("samples", 63),
        ("precision", "bf16"),
        ("max_grad_norm", 1.0),
        ("optimizer", "SGD{}"),
        ("weights", "abd"),
    ],
)
def test_what_differs_is_named_with_its_rank(field: str, value: object) -> None:
    sentence = difference([SAID, SAID, msgspec.structs.replace(SAID, **{field: value})])
    assert sentence is not None
    assert "rank 2" in sentence or "and 2" in sentence


def test_the_digest_sees_one_changed_number_of_a_small_tensor_and_any_other_draw() -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(300, 300))

    first, again, other = model(0), model(0), model(1)
    assert digest_of_weights(first) == digest_of_weights(again)
    assert digest_of_weights(first) != digest_of_weights(other)
    with torch.no_grad():
        again.get_parameter("0.weight")[3, 3] += 1e-3
    assert digest_of_weights(first) != digest_of_weights(again)
