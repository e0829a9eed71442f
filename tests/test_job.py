"""Job: what it accepts, what it refuses and how it says so, and what it builds."""

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset

import atoll
from atoll.data import Shapes
from atoll.errors import JobError
from atoll.job import Job


class Tied(nn.Module):
    """Two users of one weight, a buffer and a frozen parameter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Parameter(torch.rand(width), requires_grad=False)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return torch.zeros(())


GOOD: dict[str, Any] = {"model": Tied, "loss": loss, "data": range(10), "optimizer": torch.optim.SGD, "batch_size": 4, "steps": 3}


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batchsize": 4}, r"Job has no argument 'batchsize'; did you mean batch_size"),
        ({"learning": 4}, r"Job has no argument 'learning'; it takes model, loss, data"),
        ({"batch_size": 0}, "batch_size: must be a positive whole number, got 0"),
        ({"batch_size": 2.0}, r"batch_size: must be a positive whole number, got 2\.0"),
        ({"batch_size": True}, "batch_size: must be a positive whole number, got True"),
        ({"steps": -1}, "steps: must be a positive whole number, got -1"),
        ({"steps": None}, "steps: give either steps or epochs$"),
        ({"epochs": 1}, "steps: give either steps or epochs, not both"),
        ({"steps": None, "epochs": float("inf")}, "epochs: must be a positive number, got inf"),
        ({"micro_batch_size": 5}, r"micro_batch_size: must not exceed batch_size \(4\), got 5"),
        ({"seed": 1.5}, r"seed: must be a whole number from 0 to 2\*\*64 - 1, got 1\.5"),
        ({"seed": 2**64}, "seed: must be a whole number from 0 to .*, got 18446744073709551616"),
        ({"seed": -1}, "seed: must be a whole number from 0 to .*, got -1"),
        ({"metrics": {"loss": loss}, "eval_data": range(3)}, "metrics: 'loss' is what the evaluation loss is called"),
        ({"metrics": {"": loss}, "eval_data": range(3)}, "metrics: names must be words, got ''"),
        ({"metrics": {3: loss}, "eval_data": range(3)}, "metrics: names must be words, got 3"),
        ({"precision": "fp8"}, "precision: must be 'fp32', 'bf16', 'fp16' or 'bf16-true', got 'fp8'"),
        ({"name": ""}, "name: must be a word or two"),
        ({"max_grad_norm": "1"}, "max_grad_norm: must be a positive number, got '1'"),
        ({"eval_every": 3}, "eval_every: needs eval_data"),
        ({"metrics": {"accuracy": loss}}, "metrics: needs eval_data"),
        ({"metrics": [loss]}, "metrics: must be a mapping from names to functions"),
        (
            {"metrics": {"accuracy": 3}, "eval_data": range(3)},
            r"metrics\['accuracy'\]: must be a function metric\(model, batch\), got int 3",
        ),
        ({"callbacks": print}, "callbacks: must be a list of callables"),
        ({"callbacks": [3]}, r"callbacks\[0\]: must be a callable that takes an event, or an event and the run, got int 3"),
        (
            {"model": nn.Linear},
            r"model: must be a torch.nn.Module or a callable .* missing a required argument: 'in_features'; give .* functools.partial",
        ),
        ({"model": "gpt2"}, "model: must be a torch.nn.Module or a callable without arguments that builds one, got str 'gpt2'"),
        (
            {"loss": lambda batch: batch},
            r"loss: must be a function loss\(model, batch\), but <lambda>\(batch\) cannot be called so: too many",
        ),
        ({"data": 3}, "data: must be data with __len__ and __getitem__, an IterableDataset, a DataLoader, or a callable"),
        ({"data": Endless(), "steps": None, "epochs": 1}, "epochs: data that is read in order has no length; give steps"),
        ({"data": Endless(), "sampler": reversed}, "sampler: data that is read in order comes in its own"),
        ({"data": Endless(), "drop_last": True}, "drop_last: the last batch of a stream's epoch is filled up from the next"),
        ({"num_workers": -1}, "num_workers: must be a whole number, 0 or more, got -1"),
        ({"sampler": 3}, "sampler: must be a torch.utils.data.Sampler or a callable from the epoch to its indices, got int 3"),
        ({"collate": list}, "Job has no argument 'collate'; did you mean collate_fn"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))])}, "optimizer: SGD: it is built already, but the model is not"),
        (
            {"model": nn.Linear(1, 1), "optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))])},
            r"optimizer: SGD: it has a parameter of shape \[1\] that is none of the model's",
        ),
        (
            {"scheduler": StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), 1)},
            r"scheduler: this StepLR is built already; give a call",
        ),
        ({"collate_fn": None}, "collate_fn: must be a callable from a list of samples"),
        ({"scheduler": partial(torch.optim.lr_scheduler.StepLR)}, "scheduler: .* missing a required argument: 'step_size'"),
    ],
)
def test_wrong_arguments_are_named_with_what_to_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Job(**{**GOOD, **change})


def test_a_built_optimizer_of_a_built_model_steps_as_it_would_by_hand() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(3, 1), torch.randn(8, 3)
    by_hand = copy.deepcopy(model)

    def groups(of: nn.Linear) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [of.weight]}, {"params": [of.bias], "lr": 0.5}], lr=0.1, momentum=0.9)

    given = groups(model)
    job = Job(model=model, loss=lambda m, x: m(x).square().mean(), data=inputs, optimizer=given, batch_size=4, steps=3)
    job.run(progress=False)
    optimizer = groups(by_hand)
    for step in range(3):
        optimizer.zero_grad()
        by_hand(job.samples.batch(step)).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(by_hand.named_parameters()), rtol=0, atol=0)
    given.param_groups[0]["lr"] = 1.0
    with pytest.raises(JobError, match="the SGD given to Job was changed, but it is not the one that steps"):
        job.run(progress=False)


def test_missing_and_positional_arguments() -> None:
    with pytest.raises(JobError, match="Job needs optimizer and batch_size: Job"):
        Job(model=Tied, loss=loss, data=range(3), steps=1)  # type: ignore[call-arg]
    with pytest.raises(JobError, match="Job takes its arguments by name"):
        Job(Tied, loss)  # type: ignore[call-arg,misc]


def test_a_job_is_frozen_and_can_be_varied() -> None:
    job = Job(**GOOD)
    with pytest.raises(AttributeError):
        job.steps = 5  # type: ignore[misc]
    assert replace(job, steps=5).total_steps == 5


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (0.5, 2), (0.1, 1)])
def test_epochs_round_up_to_whole_batches(epochs: float, steps: int) -> None:
    assert Job(**{**GOOD, "steps": None, "epochs": epochs}).total_steps == steps


def test_micro_batches_cover_the_batch() -> None:
    assert Job(**{**GOOD, "batch_size": 7, "micro_batch_size": 3}).micro_batches == ((0, 3), (3, 6), (6, 7))
    assert Job(**GOOD).micro_batches == ((0, 4),)


def test_lazy_data_is_built_once_and_only_when_needed() -> None:
    built = []

    def build() -> Shapes:
        built.append(0)
        return Shapes(count=5)

    job = Job(**{**GOOD, "data": build})
    assert not built
    images, labels = job.example_batch(7)  # more than there are: the next epoch follows
    assert images.shape == (7, 1, 32, 32)
    assert labels.shape == (7,)
    assert torch.equal(job.example_batch(2)[0], images[:2])
    assert len(job.dataset) == 5
    assert built == [0]
    assert torch.equal(Job(**{**GOOD, "data": partial(Shapes, count=5)}).example_batch(7)[0], images)
    with pytest.raises(JobError, match="samples must be at least 1"):
        job.example_batch(0)


def test_the_same_seed_builds_the_same_model() -> None:
    job = Job(**GOOD)
    torch.manual_seed(1)
    one = job.build_model().state_dict()
    torch.manual_seed(2)
    other = job.build_model().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["frozen"], replace(job, seed=1).build_model().state_dict()["frozen"])


@pytest.mark.parametrize("built", [Tied, Tied(), partial(Tied, 8), lambda: Tied().eval()], ids=["class", "module", "partial", "eval"])
def test_a_model_on_meta_has_the_same_shape_and_no_storage(built: nn.Module | Callable[[], nn.Module]) -> None:
    model = Job(**{**GOOD, "model": built}).build_model("meta")
    assert isinstance(model, Tied)
    assert model.training
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert model.head.weight is model.embedding.weight
    assert not model.frozen.requires_grad
    assert model.embedding.weight.requires_grad
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Tied().named_parameters()]
    if isinstance(built, Tied):
        assert not built.frozen.is_meta


def test_the_optimizer_gets_what_is_trained() -> None:
    job = Job(**GOOD)
    model = job.build_model()
    (group,) = job.build_optimizer(model.parameters()).param_groups
    assert len(group["params"]) == 3
    assert all(parameter.requires_grad for parameter in group["params"])


def test_precision_is_an_ambient_autocast() -> None:
    layer, values = nn.Linear(2, 2), torch.ones(1, 2)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        job = Job(**{**GOOD, "precision": precision})
        with job.autocast("cpu"):
            assert layer(values).dtype == job.compute_dtype == dtype


def test_importing_atoll_loads_neither_torch_nor_the_rest() -> None:
    code = (
        "import sys, atoll; assert not {'torch', 'transformers'} & set(sys.modules); atoll.Job; assert 'atoll.runtime' not in sys.modules; "
        "atoll.from_trainer; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_names_exist() -> None:
    for name in atoll.__all__:
        assert callable(getattr(atoll, name))  # and not a module of the same name
        assert getattr(atoll, name).__doc__
        assert name in dir(atoll)
    with pytest.raises(AttributeError, match="module 'atoll' has no attribute 'jobs'"):
        atoll.jobs  # noqa: B018
