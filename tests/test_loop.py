"""A loop of the user's own: the numbers of a loop written by hand, alone and in several processes, whole or in parts."""

import json
import os
import runpy
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.errors import JobError, JobFailedError
from atoll.events import CheckpointSaved, Evaluated, RunFinished, StepFinished, read_events
from atoll.runtime.modes.lockstep.calls import disagreement
from atoll.script import load_script
from tests.process_group import fork_ranks

STEPS, BATCH = 6, 8

SCRIPT = """
import json, pathlib, sys
import torch
from torch import nn
import atoll

class Data:
    def __init__(self, first=0):
        self.first = first

    def __len__(self):
        return 20

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(self.first + index)
        return torch.randn(6, generator=draw), torch.randn(3, generator=draw)

def loss(model, batch):
    inputs, wanted = batch
    return ((model(inputs) - wanted) ** 2).mean()

def distance(model, batch):
    return (model(batch[0]) - batch[1]).abs().mean()

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

if __name__ == "__main__":
    out, last, resume = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    about = {"resume": out} if resume else {"out": out}
    about["metrics"] = {"distance": distance}
    with atoll.step(model, loss=loss, optimizer=optimizer, data=Data(), batch_size=8, steps=6, progress=False, **about) as step:
        losses, evaluated = [], []
        for batch in step.batches():
            losses.append(step(batch))
            if step.number % 2 == 0:
                found = step.evaluate(Data(1000))
                evaluated.append(found.loss + found.metrics["distance"])
            if step.number == last:
                break
        weights = step.state_dict()
    if step.rank == 0:
        found = {"losses": losses, "evaluated": evaluated, "weights": {name: value.tolist() for name, value in weights.items()}}
        pathlib.Path(f"{out}-{last}.json").write_text(json.dumps(found))
    else:
        assert not weights
"""
PIPELINE = """plan v1 graph=job cluster=two mode=lockstep schedule=1f1b batch=8 micro_batch=2
stage 0: layers 0-0: oslo/0=8
stage 1: layers 1-1: rome/0=8
"""


def by_hand(samples: Any) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """What SCRIPT trains, in plain PyTorch; only the order of the samples is Atoll's."""
    script = runpy.run_path(str(samples / "train.py"), run_name="reference")
    model, loss, data, held_out = script["model"], script["loss"], script["Data"](), script["Data"](1000)
    order = atoll.Job(model=model, loss=loss, data=data, optimizer=torch.optim.SGD, batch_size=BATCH, steps=STEPS).samples
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, evaluated = [], []
    for number in range(STEPS):
        picked = [data[order.index(position)] for position in range(number * BATCH, (number + 1) * BATCH)]
        value = loss(model, tuple(torch.stack(column) for column in zip(*picked, strict=True)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
        if number % 2:
            with torch.no_grad():
                everything = tuple(torch.stack(column) for column in zip(*[held_out[i] for i in range(20)], strict=True))
                evaluated.append(float(loss(model, everything)) + float(script["distance"](model, everything)))
    return losses, evaluated, dict(model.state_dict())


def execute(folder: Path, *arguments: str) -> None:
    """As `python train.py arguments…` in this process."""
    before = sys.argv, os.getcwd()
    sys.argv = ["train.py", *arguments]
    os.chdir(folder)
    try:
        runpy.run_path("train.py", run_name="__main__")
    finally:
        sys.argv = before[0]
        os.chdir(before[1])


def rank_of_two(rank: int, port: int, folder: Path, plan: str | None, arguments: list[str]) -> None:
    """As torchrun would start it."""
    role = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in role.items()})
    if plan is not None:
        (folder / f"{rank}.plan").write_text(plan)
        os.environ["ATOLL_PLAN"] = str(folder / f"{rank}.plan")
    torch.set_num_threads(1)
    execute(folder, *arguments)


def in_two_processes(folder: Path, plan: str | None, *arguments: str) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return fork_ranks(2, rank_of_two, port, folder, plan, list(arguments))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def found(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())  # type: ignore[no-any-return]


def assert_alike(own: dict[str, Any], hand: tuple[list[float], list[float], dict[str, Tensor]], tolerance: float, since: int = 0) -> None:
    losses, evaluated, weights = hand
    assert own["losses"] == pytest.approx(losses[since:], rel=tolerance, abs=0)
    assert own["evaluated"] == pytest.approx(evaluated[since // 2 :], rel=max(tolerance, 1e-6))
    assert own["weights"].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(torch.tensor(own["weights"][name]), value, rtol=tolerance, atol=tolerance / 10)


def test_alone_it_is_the_loop_by_hand_bit_for_bit(folder: Path) -> None:
    execute(folder, "run", "6")
    assert_alike(found(folder, "run-6"), by_hand(folder), 0.0)
    events = list(read_events(folder / "run" / "events.jsonl"))
    assert [event.step for event in events if isinstance(event, StepFinished)] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events if isinstance(event, Evaluated)] == [2, 4, 6]
    assert [event.reason for event in events if isinstance(event, RunFinished)] == ["done"]
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [6]


def test_in_stages_then_in_shares_of_the_batch_it_computes_the_same(folder: Path) -> None:
    """Two ranks as a pipeline leave the loop after four steps; two others go on from there, each with half of every batch."""
    assert in_two_processes(folder, PIPELINE, "run", "4") == 0
    hand = by_hand(folder)
    first = found(folder, "run-4")
    assert first["losses"] == pytest.approx(hand[0][:4], rel=1e-5)
    assert first["evaluated"] == pytest.approx(hand[1][:2], rel=1e-5)
    assert in_two_processes(folder, None, "run", "6", "resume") == 0
    assert_alike(found(folder, "run-6"), hand, 1e-5, since=4)
    reasons = [event.reason for event in read_events(folder / "run" / "events.jsonl") if isinstance(event, RunFinished)]
    assert reasons == ["stopped", "done"]


def model_and_data() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=draw), torch.randn(2, generator=draw)) for _ in range(12)]
    return nn.Linear(4, 2), data


def squares(model: nn.Module, batch: Any) -> Tensor:
    inputs, wanted = batch
    return ((model(inputs) - wanted) ** 2).mean()  # type: ignore[no-any-return]


def opened(**arguments: Any) -> Any:
    model, data = model_and_data()
    given: dict[str, Any] = {"loss": squares, "optimizer": partial(torch.optim.SGD, lr=0.1), "data": data, "batch_size": 4, "steps": 3}
    return atoll.step(arguments.pop("model", model), progress=False, **{**given, **arguments})


@pytest.fixture
def sgd() -> Callable[..., tuple[nn.Module, torch.optim.Optimizer]]:
    """From settings to a model and an optimizer over it."""
    return lambda **settings: (model := nn.Linear(4, 2), torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings}))


def test_a_loop_draws_numbers_of_its_own_and_they_stay_its_own() -> None:
    torch.manual_seed(5)
    expected = [float(torch.rand(())) for _ in range(3)]
    with opened() as step:
        torch.manual_seed(5)
        drawn = []
        for batch in step.batches():
            step(batch)
            drawn.append(float(torch.rand(())))
    assert drawn == expected


def test_a_batch_says_which_samples_it_is() -> None:
    _, data = model_and_data()
    with opened() as step:
        seen = []
        for batch in step.batches():
            assert torch.equal(batch.load()[0], torch.stack([data[i][0] for i in batch.indices]))
            seen += batch.indices
            step(batch)
    assert sorted(seen) == list(range(12))  # an epoch


def test_a_loop_may_stop_and_look_at_the_weights_after_it() -> None:
    with opened(steps=100) as step:
        for batch in step.batches():
            step(batch)
            if step.number == 2:
                step.stop()
        assert step.number == 3  # the one after it was the last
        assert step.evaluate(model_and_data()[1]).loss is not None
        assert step.state_dict().keys() == {"weight", "bias"}
    with pytest.raises(JobError, match="the run has ended"):
        step.state_dict()


WRONG = """
import torch, atoll
model = torch.nn.Linear(2, 1)
data = [torch.ones(2)] * 8
given = {{"loss": lambda model, batch: model(batch).mean(), "optimizer": torch.optim.SGD, "data": data, "batch_size": 4, "steps": 3}}
with atoll.step(model, progress=False, **given) as step:
    for batch in step.batches():
        {mistake}
"""


@pytest.mark.parametrize("mistake", ["step(batch); step(batch)", "step(3)", "step.evaluate()", "pass"])
def test_a_wrong_loop_ends_its_script_with_a_sentence(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.py").write_text(WRONG.format(mistake=mistake))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(JobError):
        runpy.run_path(str(tmp_path / "wrong.py"), run_name="__main__")
    assert sys.excepthook is not sys.__excepthook__, "which would show a traceback through Atoll"


def test_a_wrong_loop_is_told_what_is_wrong() -> None:
    with opened() as step, pytest.raises(JobError, match="without step\\(batch\\) for batch 1"):
        for _ in step.batches():
            pass
    with opened() as step:
        first = next(step.batches())
        step(first)
        with pytest.raises(JobError, match="this is batch 1, and the next step is 2"):
            step(first)
        with pytest.raises(JobError, match=r"what step\.batches\(\) yields, not list"):
            step([1, 2])


def all_steps(after: Callable[[], object] = lambda: None, **arguments: Any) -> None:
    with opened(**arguments) as step:
        for batch in step.batches():
            step(batch)
            after()


def test_an_error_in_the_loop_ends_the_run_as_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        all_steps(lambda: 1 // 0, out=tmp_path / "run")
    ended = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, RunFinished)]
    assert [(event.reason, event.steps) for event in ended] == [("failed", 1)]
    assert "the loop failed: ZeroDivisionError" in ended[0].message


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    with pytest.raises(JobFailedError, match="step 1: the loss is"):
        all_steps(loss=lambda model, batch: squares(model, batch) * float("inf"))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda model, optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer), "a schedule was made for it"),
        (lambda model, optimizer: optimizer.register_step_post_hook(lambda *_: None), "it has hooks"),
        (lambda model, optimizer: optimizer.param_groups[0]["params"].pop(), "leaves out 'bias'"),
        (lambda model, optimizer: optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3))), "none of the model's"),
        (lambda model, optimizer: (model(torch.ones(4)).sum().backward(), optimizer.step(), optimizer.state.update({0: 1})), "made steps"),
    ],
)
def test_an_optimizer_that_cannot_be_built_again_is_refused(sgd: Any, spoil: Any, sentence: str) -> None:
    model, optimizer = sgd()
    spoil(model, optimizer)
    with pytest.raises(JobError, match=sentence):
        opened(model=model, optimizer=optimizer)


def test_changing_the_optimizer_that_was_given_is_an_error_and_changing_the_one_that_steps_works(sgd: Any) -> None:
    model, optimizer = sgd(momentum=0.5)
    with opened(model=model, optimizer=optimizer, steps=4) as step:
        batches = step.batches()
        step(next(batches))
        step.optimizer.param_groups[0]["lr"] = 0.0
        before = step.state_dict()
        step(next(batches))
        assert torch.equal(step.state_dict()["weight"], before["weight"])
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(JobError, match=r"not the one that steps: change step\.optimizer"):
            step(next(batches))


def test_ranks_that_do_not_make_the_same_calls_are_told_so() -> None:
    assert disagreement([(0, 3), (0, 3)], 0) is None
    wrong = disagreement([(0, 3), (1, 3)], 0)
    assert wrong is not None
    assert "rank 0 is about to make a step after step 3, rank 1 to evaluate after step 3" in wrong


def test_the_job_of_a_loop_is_found_without_training(folder: Path) -> None:
    found = load_script(folder / "train.py", ["nowhere", "6"])
    assert (found.own_loop, found.job.batch_size, found.job.steps) == (True, BATCH, STEPS)
    assert not (folder / "nowhere").exists()
    (folder / "train.py").write_text(SCRIPT.replace('== "__main__"', '== "elsewhere"'))
    with pytest.raises(JobError, match=r"it ends without asking for a run"):
        load_script(folder / "train.py", ["nowhere", "6"])
