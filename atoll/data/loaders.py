"""A `torch.utils.data.DataLoader` given as data: what it says of the job's data, and what it says that a job cannot carry."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from atoll.errors import JobError

__all__ = ["evaluation_parts", "training_parts"]


def training_parts(loader: "DataLoader[Any]", given: Mapping[str, Any]) -> dict[str, Any]:
    """The job's arguments that a DataLoader given as `data` stands for. `given` are the job's own: both must not say different things."""
    _refuse_unknown("data", loader)
    batch_sampler: Any = loader.batch_sampler
    stream = isinstance(loader.dataset, IterableDataset)
    parts: dict[str, Any] = {
        "data": loader.dataset,
        "batch_size": loader.batch_size or batch_sampler.batch_size,
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "sampler": None if stream else _sampler(batch_sampler.sampler),
        "drop_last": loader.drop_last or (not stream and batch_sampler.drop_last),
    }
    defaults = {"batch_size": None, "collate_fn": default_collate, "num_workers": 0, "sampler": None, "drop_last": False}
    for name, default in defaults.items():
        own = given[name]
        if own is default or own == default:
            continue
        if parts[name] not in (default, own) or (name == "batch_size" and parts[name] != own):
            _refuse("data", f"the DataLoader's {name} is {parts[name]!r} and the job's {own!r}; give it in one place")
        parts[name] = own
    return parts


def _sampler(sampler: Any) -> Any:
    """None for what a job does anyway: all of the data in a random order."""
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return None if shuffles else sampler


def evaluation_parts(loader: "DataLoader[Any]", collate_fn: object) -> Any:
    """The data set of a DataLoader given as `eval_data`. It is evaluated on in its own order, in batches of the job's size."""
    _refuse_unknown("eval_data", loader)
    if loader.collate_fn is not collate_fn:
        _refuse("eval_data", f"the DataLoader's collate_fn is {loader.collate_fn!r} and the job's {collate_fn!r}; a job has one for both")
    if loader.drop_last:
        _refuse("eval_data", "the DataLoader has drop_last=True, which leaves samples out; evaluation is over all of the data")
    sampler: Any = loader.sampler
    if not isinstance(loader.dataset, IterableDataset) and _sampler(sampler) is not None and type(sampler) is not SequentialSampler:
        _refuse("eval_data", f"the DataLoader has a {type(sampler).__name__}; evaluation is over all of the data: give what is to be seen")
    return loader.dataset


def _refuse_unknown(argument: str, loader: "DataLoader[Any]") -> None:
    stream = isinstance(loader.dataset, IterableDataset)
    if loader.batch_sampler is None and loader.batch_size is None:
        _refuse(argument, "the DataLoader has batch_size=None: its data set makes whole batches; give one that makes samples")
    if not stream and type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler).__name__
        _refuse(argument, f"the DataLoader has a {kind} as batch_sampler, whose batches cannot be divided; give a sampler and batch_size")
    if loader.worker_init_fn is not None and loader.num_workers:
        _refuse(
            argument,
            "the DataLoader has a worker_init_fn, which is not run: generators are seeded for every sample, whoever loads it; "
            "leave it out, and open what a worker needs when it is asked for its first sample",
        )


def _refuse(argument: str, what: str) -> NoReturn:
    raise JobError(f"Job: {argument}: {what}")
