"""Sizes that vary from batch to batch are seen in the first batches, or declared."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from atoll.errors import CaptureError
from atoll.graph.capture import capture_program
from atoll.job import Job


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, 4), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(self.out(self.table(ids)).mean())


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return torch.as_tensor(model(batch["ids"]))


def padded(rows: list[int]) -> dict[str, Tensor]:
    return {"ids": torch.ones(len(rows), max(rows), dtype=torch.long)}


def job(lengths: list[int], **more: Any) -> Job:
    arguments = {"model": Model, "loss": loss, "data": lengths, "sampler": SequentialSampler(lengths), "collate_fn": padded}
    return Job(**{**arguments, "optimizer": torch.optim.SGD, "batch_size": 4, "steps": 1, **more})


def test_lengths_that_vary_are_seen_in_later_samples() -> None:
    assert capture_program(job([5] * 12 + [7] * 20)).varying == {"['ids']": (0, 1)}


def test_lengths_that_vary_are_declared() -> None:
    even = [5] * 40
    assert capture_program(job(even)).varying == {"['ids']": (0,)}
    assert capture_program(job(even, dynamic={"ids": 1})).varying == {"['ids']": (0, 1)}
    with pytest.raises(CaptureError, match=r"dynamic: the batch has no tensor 'labels'; it has batch\['ids'\]"):
        capture_program(job(even, dynamic={"labels": 1}))
    with pytest.raises(CaptureError, match=r"dynamic: batch\['ids'\] has 2 dimensions; there is no dimension 2"):
        capture_program(job(even, dynamic={"ids": [1, 2]}))
