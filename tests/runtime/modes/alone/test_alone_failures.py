"""What a job's own code raises in a run: a sentence with the step, the sample and the user's own lines."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from atoll.errors import JobError, JobFailedError
from atoll.job import Job


def fail(*arguments: Any) -> Any:
    raise ZeroDivisionError("mine")


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Rows:
    """Rows of ones of which some cannot be read."""

    def __init__(self, bad: int = -1) -> None:
        self.bad, self.length = bad, 20

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return fail() if index == self.bad else torch.ones(4)


class NoBackward(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    backward = fail


class Stubborn(torch.optim.SGD):
    """Its step fails."""

    def step(self, closure: Any = None) -> Any:
        return fail()


JOB = Job(model=lambda: nn.Linear(4, 2), loss=loss, data=Rows(), optimizer=torch.optim.SGD, batch_size=4, micro_batch_size=2, steps=6)
SEVENTH = JOB.samples.index(7)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"data": Rows(bad=SEVENTH)}, f"step 2: loading the batch failed: ZeroDivisionError: mine (sample {SEVENTH} of 20)"),
        (
            {"collate_fn": fail},
            f"step 1: loading the batch failed: ZeroDivisionError: mine (collating samples {JOB.samples.index(0)}, {JOB.samples.index(1)})",
        ),
        ({"loss": lambda model, batch: fail()}, "step 1: the loss failed: ZeroDivisionError: mine"),
        ({"loss": lambda model, batch: NoBackward.apply(loss(model, batch))}, "step 1: backward failed: ZeroDivisionError: mine"),
        ({"optimizer": Stubborn}, "step 1: the optimizer failed: ZeroDivisionError: mine"),
        (
            {"scheduler": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 if step < 3 else fail())},
            "step 3 of 6: the learning-rate schedule failed: ZeroDivisionError: mine",
        ),
        ({"eval_data": Rows(bad=3)}, "evaluation after step 6: loading samples 2 to 3 failed: ZeroDivisionError: mine (sample 3 of 20)"),
        (
            {"eval_data": Rows(), "eval_every": 2, "eval_loss": fail},
            "evaluation after step 2: eval_loss failed: ZeroDivisionError: mine",
        ),
        ({"eval_data": Rows(), "metrics": {"m": fail}}, "evaluation after step 6: metrics['m'] failed: ZeroDivisionError: mine"),
    ],
)
def test_what_the_jobs_own_code_raises_is_told_with_its_place(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobFailedError) as caught:
        replace(JOB, **change).run(progress=False, device="cpu")
    first, *lines = str(caught.value).splitlines()
    assert first == sentence
    assert lines
    assert lines[-1].endswith('in fail: raise ZeroDivisionError("mine")')
    assert all("test_alone_failures.py:" in line for line in lines), "neither Atoll's frames nor PyTorch's"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("change", [-5, +5])
def test_data_must_keep_its_length(change: int) -> None:
    data = Rows()

    def resize(event: Any) -> None:
        data.length = 20 + change

    with pytest.raises(JobError, match=f"Job: data: its length changed from 20 to {20 + change} while it was in use"):
        replace(JOB, data=data, callbacks=[resize]).run(progress=False)


@pytest.mark.parametrize("metric", [lambda model, batch: 0.5, lambda model, batch: torch.tensor(0.5), lambda model, batch: True])
def test_a_metric_may_be_a_plain_number(metric: Callable[[Any, Any], Any]) -> None:
    result = replace(JOB, eval_data=Rows(), metrics={"half": metric}).run(progress=False)
    assert result.evaluations[0].metrics["half"] == float(metric(None, None))


def test_a_metric_that_returns_something_else_is_named() -> None:
    with pytest.raises(JobError, match=r"Job: metrics\['words'\]: it must return a tensor or \(total, weight\), it returned str"):
        replace(JOB, eval_data=Rows(), metrics={"words": lambda model, batch: "many"}).run(progress=False)
