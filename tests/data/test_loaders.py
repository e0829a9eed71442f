"""A DataLoader given as data: the job takes it apart, and refuses what it cannot carry."""

import multiprocessing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from atoll.errors import JobError
from atoll.job import Job
from atoll.randomness import mix

ROWS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


def doubled(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) * 2


def job(data: Any, **more: Any) -> Job:
    return Job(**{"model": lambda: nn.Linear(3, 2), "loss": loss, "data": data, "optimizer": torch.optim.SGD, "steps": 5, **more})


def test_training_with_a_loader_is_the_plain_loop_over_it() -> None:
    """In the sampler's order, with whole batches only: then PyTorch's batches and Atoll's are the same."""
    sampler = WeightedRandomSampler([1.0, 2, 3, 4, 5, 6, 7], 8)
    given = job(DataLoader(ROWS, batch_size=4, sampler=sampler, collate_fn=doubled))  # type: ignore[arg-type]
    model = given.build_model()
    optimizer, expected = torch.optim.SGD(model.parameters()), []
    for epoch in range(3):
        torch.manual_seed(mix(0, 6, epoch))
        for batch in DataLoader(ROWS, batch_size=4, sampler=list(sampler), collate_fn=doubled):  # type: ignore[arg-type]
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            expected.append(value.item())
    assert list(given.run(progress=False, device="cpu").losses) == expected[:5]
    assert (given.batch_size, given.num_workers, given.total_steps) == (4, 0, 5)
    assert replace(given, batch_size=2).batch_size == 2


def test_what_both_say_must_agree() -> None:
    loader = DataLoader(ROWS, batch_size=4, shuffle=True, num_workers=2)  # type: ignore[arg-type]
    assert job(loader, batch_size=4).num_workers == 2
    assert job(loader, collate_fn=doubled).collate_fn is doubled
    assert job(loader).sampler is None
    assert job(DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(range(7)), 3, True))).drop_last  # type: ignore[arg-type]
    with pytest.raises(JobError, match="the DataLoader's batch_size is 4 and the job's 8; give it in one place"):
        job(loader, batch_size=8)
    with pytest.raises(JobError, match="the DataLoader's num_workers is 2 and the job's 3"):
        job(loader, num_workers=3)
    with pytest.raises(JobError, match="Job needs batch_size"):
        job(ROWS)
    with pytest.raises(JobError, match="the callable returned a DataLoader; give the DataLoader itself"):
        job(lambda: loader, batch_size=4).samples  # noqa: B018


def test_a_script_that_trains_when_a_worker_imports_it_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)  # as while a process begins
    with pytest.raises(JobError, match=r'put what trains under `if __name__ == "__main__":`'):
        job(ROWS, batch_size=4).run(progress=False)


class Grouped(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": None}, "batch_size=None: its data set makes whole batches"),
        ({"batch_sampler": Grouped(RandomSampler(range(7)), 2, False)}, "a Grouped as batch_sampler, whose batches cannot be divided"),
        ({"batch_size": 2, "num_workers": 1, "worker_init_fn": print}, "a worker_init_fn, which is not run"),
    ],
)
def test_what_a_job_cannot_carry_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job(DataLoader(ROWS, **arguments))  # type: ignore[arg-type]


def test_evaluation_takes_all_of_a_loaders_data() -> None:
    evaluated = job(ROWS, batch_size=4, eval_data=DataLoader(ROWS, batch_size=3)).run(progress=False, device="cpu")  # type: ignore[arg-type]
    assert evaluated.model is not None
    with torch.no_grad():
        assert evaluated.evaluations[-1].loss == pytest.approx(float(loss(evaluated.model, ROWS)), rel=1e-6)
    for arguments, message in (
        ({"sampler": SubsetRandomSampler([1, 2])}, "has a SubsetRandomSampler; evaluation is over all of the data"),
        ({"drop_last": True}, "has drop_last=True, which leaves samples out"),
        ({"collate_fn": doubled}, "a job has one for both"),
    ):
        with pytest.raises(JobError, match=message):
            job(ROWS, batch_size=4, eval_data=DataLoader(ROWS, batch_size=3, **arguments))  # type: ignore[arg-type]
