"""What fails between steps (an evaluation, a callback, loading data) costs no step: the last one is saved, and the run goes on exactly."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from atoll.errors import JobFailedError
from atoll.events import AnyEvent, CheckpointSaved, Evaluated, StepFinished, read_events
from atoll.job import Job
from tests.process_group import fork_ranks

from .test_stream_modes import free_ports


class Rows:
    """Rows of which one cannot be read, where that is said."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        if index == self.bad:
            raise ZeroDivisionError("mine")
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


JOB = Job(
    model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
    loss=loss,
    data=Rows(),
    eval_data=Rows(),
    eval_every=3,
    optimizer=partial(torch.optim.AdamW, lr=0.05),
    scheduler=partial(ReduceLROnPlateau, factor=0.1, patience=0, threshold=0.9),  # each evaluation changes what follows
    batch_size=4,
    steps=9,
)


def raise_after(step: int) -> Any:
    def callback(event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == step:
            raise KeyError("mine")

    return callback


def check_it_goes_on(run: Path, saved: int) -> None:
    whole, result = JOB.run(progress=False), JOB.run(resume=run, progress=False)
    events = list(read_events(run / "events.jsonl"))
    assert next(event.step for event in events if isinstance(event, CheckpointSaved)) == saved
    assert result.losses == pytest.approx(whole.losses, rel=1e-5)
    assert [event.step for event in events if isinstance(event, StepFinished)] == list(range(1, 10)), "every step once"
    told = {event.step: event.loss for event in events if isinstance(event, Evaluated)}
    assert told == pytest.approx({event.step: event.loss for event in whole.evaluations}, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "saved"),
    [
        ({"eval_data": Rows(bad=7)}, 3),
        ({"callbacks": [raise_after(4)]}, 4),
        ({"data": Rows(bad=JOB.samples.index(17))}, 4),
    ],
)
def test_alone_the_last_step_is_saved(change: dict[str, Any], saved: int, tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match="mine"):
        replace(JOB, **change).run(out=tmp_path, progress=False)
    check_it_goes_on(tmp_path, saved)


def test_what_fails_within_a_step_is_not_saved(tmp_path: Path) -> None:
    calls: list[None] = []

    def fail_later(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(None)
        return loss(model, batch) * (1.0 if len(calls) < 5 else float("nan"))

    with pytest.raises(JobFailedError, match="step 5: the loss is nan"):
        replace(JOB, loss=fail_later, eval_data=None, eval_every=None, scheduler=None).run(out=tmp_path, progress=False)
    assert not [event for event in read_events(tmp_path / "events.jsonl") if isinstance(event, CheckpointSaved)]


def fail_in_lockstep(rank: int, port: int, run: Path) -> None:
    role = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in role.items()})
    replace(JOB, eval_data=Rows(bad=7)).run(out=run, progress=False)


def test_in_lockstep_it_is_saved_before_the_first_evaluation(tmp_path: Path) -> None:
    assert fork_ranks(1, fail_in_lockstep, *free_ports(1), tmp_path) != 0
    check_it_goes_on(tmp_path, 3)
