"""A run alone saves and goes on: losses and weights are, bit for bit, those of a run that was never stopped."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from atoll.data import Shapes
from atoll.errors import CheckpointError, JobError, JobFailedError
from atoll.events import AnyEvent, CheckpointFailed, CheckpointRestored, CheckpointSaved, StepFinished, StopTraining, read_events
from atoll.job import Job, RunResult


class Classifier(nn.Module):
    """Dropout, running statistics, a tied parameter, a frozen one and a buffer that is put in its place anew at every forward."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Dropout(0.3))
        self.inner, self.head = nn.Linear(900, 8), nn.Linear(8, 4)
        self.again = nn.Linear(8, 4)
        self.again.weight = self.head.weight
        self.again.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.seen = self.seen + 1
        inner = nn.functional.dropout(self.inner(self.body(images)), 0.2, self.training)
        return torch.as_tensor(self.head(inner) + self.again(inner).tanh())


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


JOB = Job(
    model=Classifier,
    loss=loss,
    data=Shapes(count=50),
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
    batch_size=16,
    steps=10,
    micro_batch_size=8,
    max_grad_norm=0.5,
    scheduler=partial(OneCycleLR, max_lr=0.05, total_steps=10),
    seed=11,
)


def stopping(after: int) -> Any:
    def stop(event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == after:
            raise StopTraining

    return stop


def state_of(result: RunResult) -> dict[str, Tensor]:
    assert result.model is not None
    assert result.optimizer is not None
    moments = {f"{n}.{k}": torch.as_tensor(v) for n, s in result.optimizer.state_dict()["state"].items() for k, v in s.items()}
    return dict(result.model.state_dict()) | moments


def equal(a: RunResult, b: RunResult) -> bool:
    one, other = state_of(a), state_of(b)
    return a.losses == b.losses and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", [partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path, precision: Any, optimizer: Any) -> None:
    job = replace(JOB, precision=precision, optimizer=optimizer)
    whole = job.run(progress=False)
    first = replace(job, callbacks=[stopping(5)]).run(out=tmp_path, progress=False)
    assert (first.reason, len(first.losses)) == ("stopped", 5)
    assert equal(job.run(resume=tmp_path, progress=False), whole)


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    """A loss so large that fp16 overflows at first: the scale is halved, and the resumed run does not begin anew."""
    job = replace(JOB, precision="fp16", max_grad_norm=None, loss=lambda model, batch: loss(model, batch) * 40)
    skipped: list[bool] = []
    whole = replace(job, callbacks=[lambda e: skipped.append(not e.applied) if isinstance(e, StepFinished) else None]).run(progress=False)
    assert any(skipped[:5]), "nothing overflowed: the test is not one"
    replace(job, callbacks=[stopping(5)]).run(out=tmp_path, progress=False)
    assert equal(job.run(resume=tmp_path, progress=False), whole)


def test_it_saves_every_so_many_steps_at_the_end_and_after_ctrl_c(tmp_path: Path) -> None:
    def press(event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == 5:
            signal.raise_signal(signal.SIGINT)

    replace(JOB, callbacks=[press]).run(out=tmp_path, progress=False, checkpoint_every=2)
    saved = [event.step for event in read_events(tmp_path / "events.jsonl") if isinstance(event, CheckpointSaved)]
    assert saved == [2, 4, 5]
    assert equal(JOB.run(resume=tmp_path, progress=False), JOB.run(progress=False))
    events = list(read_events(tmp_path / "events.jsonl"))
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [2, 4, 5, 6, 8, 10], "the interval is remembered"
    assert [event.step for event in events if isinstance(event, CheckpointRestored)] == [5]
    moments = [event.at_seconds for event in events]
    assert moments == sorted(moments), "the run's own time goes on"


def test_a_killed_run_goes_on_from_its_last_save(tmp_path: Path) -> None:
    script = """
import os, signal, torch
torch.set_num_threads(int(os.environ["THREADS"]))
from tests.runtime.modes.alone.test_checkpoints import JOB
from dataclasses import replace
from atoll.events import CheckpointSaved
def kill(event):
    if isinstance(event, CheckpointSaved): os.kill(os.getpid(), signal.SIGKILL)
replace(JOB, callbacks=[kill]).run(out=os.environ["RUN"], progress=False, checkpoint_every=3)
"""
    environment = os.environ | {"RUN": str(tmp_path / "run"), "THREADS": str(torch.get_num_threads())}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    result = JOB.run(resume=tmp_path / "run", progress=False)
    assert equal(result, JOB.run(progress=False))
    (resumed,) = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, CheckpointRestored)]
    assert resumed.step == 3


def test_a_finished_run_has_nothing_left_and_can_be_made_longer(tmp_path: Path) -> None:
    job = replace(JOB, scheduler=None)
    job.run(out=tmp_path, progress=False)
    assert job.run(resume=tmp_path, progress=False).losses == job.run(progress=False).losses
    longer = replace(job, steps=14)
    assert equal(longer.run(resume=tmp_path, progress=False), longer.run(progress=False))


def test_a_built_module_goes_on_in_place(tmp_path: Path) -> None:
    replace(JOB, model=JOB.build_model(), callbacks=[stopping(4)]).run(out=tmp_path, progress=False)
    model = JOB.build_model()
    result = replace(JOB, model=model).run(resume=tmp_path, progress=False)
    assert result.model is model
    assert equal(result, JOB.run(progress=False))


def test_what_has_changed_is_told(tmp_path: Path) -> None:
    stored = replace(JOB, store_frozen=True)  # what is made by the seed is in the checkpoint
    replace(stored, callbacks=[stopping(2)]).run(out=tmp_path, progress=False)
    replace(stored, seed=12, steps=3).run(resume=tmp_path, progress=False)
    (resumed,) = [event for event in read_events(tmp_path / "events.jsonl") if isinstance(event, CheckpointRestored)]
    assert resumed.notes == ("the seed was 11 and is 12",)
    with pytest.raises(CheckpointError, match="saved with the optimizer AdamW and the job has SGD"):
        replace(JOB, optimizer=partial(torch.optim.SGD, lr=0.1)).run(resume=tmp_path, progress=False)


def test_a_save_that_fails_ends_nothing_but_the_last_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    from atoll.runtime.checkpoint import checkpointer

    real, full = checkpointer.write_pieces, [True]

    def write(*arguments: Any) -> Any:
        if full[0]:
            raise OSError(28, "No space left on device", str(tmp_path))
        return real(*arguments)

    monkeypatch.setattr(checkpointer, "write_pieces", write)

    def make_room(event: AnyEvent) -> None:
        full[0] = full[0] and not (isinstance(event, StepFinished) and event.step == 5)

    assert equal(replace(JOB, callbacks=[make_room]).run(out=tmp_path / "a", progress=False, checkpoint_every=3), JOB.run(progress=False))
    events = list(read_events(tmp_path / "a" / "events.jsonl"))
    assert [(event.step, event.kind) for event in events if isinstance(event, (CheckpointSaved, CheckpointFailed))] == [
        (3, "checkpoint_failed"),
        (6, "checkpoint_saved"),
        (9, "checkpoint_saved"),
        (10, "checkpoint_saved"),
    ]
    full[0] = True
    with pytest.raises(JobFailedError, match=r"step 10: the last checkpoint could not be saved: .*No space left on device"):
        JOB.run(out=tmp_path / "b", progress=False)
    *_, failed, finished = read_events(tmp_path / "b" / "events.jsonl")
    assert (failed.kind, finished.kind) == ("checkpoint_failed", "run_finished")
    assert [path.name for path in (tmp_path / "b" / "checkpoints").iterdir()] == []


def test_two_runs_never_write_into_one_directory(tmp_path: Path) -> None:
    def other(event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == 1:
            with pytest.raises(JobError, match=rf"a run is under way in it \(process {os.getpid()} on .*\); wait until it has ended"):
                JOB.run(resume=tmp_path, progress=False)
            tried.append(event.step)

    tried: list[int] = []
    replace(JOB, steps=2, callbacks=[other]).run(out=tmp_path, progress=False)
    assert tried == [1]
    with pytest.raises(JobError, match="holds a run already"):
        JOB.run(out=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resume": True}, "resume: give the directory of the run to go on with"),
        ({"resume": "a", "out": "b"}, "out: a resumed run goes on in its own directory, a"),
        ({"resume": "nowhere"}, "nowhere: there is no such directory"),
        ({"checkpoint_every": 2}, "checkpoint_every: there is nowhere to save"),
        ({"out": "a", "checkpoint_every": 0}, "checkpoint_every: must be a positive whole number, got 0"),
        ({"plan": "p.plan"}, "plan and cluster are for several processes"),
    ],
)
def test_wrong_arguments_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=message):
        JOB.run(progress=False, **arguments)
    assert list(tmp_path.iterdir()) == [], "nothing is written"
