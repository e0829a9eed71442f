"""Data: which samples make up a step, and example data sets that need no download.

The training data is an endless row of positions: position p is sample `Order(seed, p // length, length)[p % length]`, and step k takes
positions k·batch_size up to (k+1)·batch_size. Every step has exactly `batch_size` samples, every epoch visits every sample once, and a
batch that begins in one epoch ends in the next.
"""

import dataclasses
import sysconfig
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from atoll.errors import JobError
from atoll.randomness import Order, mix, own_randomness, seed_everything

__all__ = ["Batch", "Dataset", "Samples", "Shapes", "SortedDigits", "StandardLibraryText", "to_device"]

Batch: TypeAlias = Any  # whatever collate makes of samples: tensors in dicts, lists, tuples…


class Dataset(Protocol):
    """Map-style data: a length, and a sample for every index below it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Samples:
    """A data set in the order training visits it. Holds no position: any batch of any step can be asked for, on any worker."""

    def __init__(self, dataset: Dataset, collate: Callable[[list[Any]], Batch], seed: int, batch_size: int) -> None:
        self.dataset, self.collate, self.seed, self.batch_size = dataset, collate, seed, batch_size
        self.length = len(dataset)
        self.reading: int | None = None  # the sample that is asked for right now; for whoever wants to know why it takes long
        self._order = lru_cache(maxsize=2)(lambda epoch: Order(seed, epoch, self.length))

    def index(self, position: int) -> int:
        """The sample at a position of the endless row."""
        epoch, place = divmod(position, self.length)
        return self._order(epoch)[place]

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Samples `start` up to `stop` of the global batch of `step` (counted from 0), collated.

        The generators are seeded anew for every sample, so that random augmentation gives the same sample whoever loads it.
        """
        stop = self.batch_size if stop is None else stop
        return self.at(range(step * self.batch_size + start, step * self.batch_size + stop))

    def at(self, positions: Sequence[int]) -> Batch:
        """The samples at these positions of the endless row, collated."""
        if len(self.dataset) != self.length:
            raise JobError(
                f"Job: data: its length changed from {self.length} to {len(self.dataset)} while it was in use; "
                "every worker computes the order of the samples from it, so it must stay the same"
            )
        with own_randomness(devices=False):
            samples = [self._sample(position) for position in positions]
            with _noting(lambda: f"collating samples {_few([self.index(position) for position in positions])}"):
                return self.collate(samples)

    def loading_seconds(self, most: int = 64) -> float:
        """Processor time that loading a step's batch takes this process, judged by the best of three tries at up to `most` samples."""
        count = min(self.batch_size, most)
        taken = []
        for number in range(3):
            began = time.process_time()
            self.at(range(number * count, (number + 1) * count))
            taken.append(time.process_time() - began)
        return min(taken) * self.batch_size / count

    def _sample(self, position: int) -> Any:
        seed_everything(mix(self.seed, 1, position), devices=False)
        index = self.index(position)
        self.reading = index
        with _noting(lambda: f"sample {index} of {self.length}"):
            sample = self.dataset[index]
        self.reading = None
        return sample


@contextmanager
def _noting(note: Callable[[], str]) -> Iterator[None]:
    """What the user's code raises passes as it is, with a note of what it was given."""
    try:
        yield
    except Exception as error:
        error.add_note(note())
        raise


def _few(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:4])) + (f" … {indices[-1]}" if len(indices) > 4 else "")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor in it on the device; dicts, lists, tuples, dataclasses and things with a `.to` method are followed."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: to_device(getattr(batch, field.name), device) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **fields)
    return batch.to(device) if hasattr(batch, "to") else batch


class StandardLibraryText:
    """The source text of the installed Python standard library, byte by byte: language-model data that needs no download.

    Sample i is `(inputs, targets)`, two int64 tensors of `sequence_length` bytes, the targets one byte further on. Files follow each other
    by path with a zero byte after each; one in twenty is kept for the split `"eval"`. Nothing is held in memory but the list of files.
    """

    vocabulary = 256

    def __init__(self, *, sequence_length: int, split: Literal["train", "eval"] = "train") -> None:
        if sequence_length < 1:
            raise JobError(f"StandardLibraryText: sequence_length must be at least 1, got {sequence_length}")
        if split not in ("train", "eval"):
            raise JobError(f"StandardLibraryText: split must be 'train' or 'eval', got {split!r}")
        self.sequence_length = sequence_length
        self._files = [file for i, file in enumerate(_standard_library_files()) if (i % 20 == 0) == (split == "eval")]
        self._starts = [0, *accumulate(file.stat().st_size + 1 for file in self._files)]
        if self._starts[-1] <= sequence_length:
            raise JobError(
                f"StandardLibraryText: {self._starts[-1]} bytes of source were found, fewer than one sequence of {sequence_length}"
            )

    def __len__(self) -> int:
        return (self._starts[-1] - 1) // self.sequence_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        text = self._read(index * self.sequence_length, self.sequence_length + 1)
        tokens = torch.frombuffer(text, dtype=torch.uint8).long()
        return tokens[:-1], tokens[1:]

    def _read(self, start: int, count: int) -> bytearray:
        text = bytearray()
        number = bisect_right(self._starts, start) - 1
        while len(text) < count:
            with self._files[number].open("rb") as file:
                file.seek(start + len(text) - self._starts[number])
                text += file.read(min(count - len(text), self._starts[number + 1] - 1 - start - len(text)))
            if len(text) < count:
                text.append(0)
            number += 1
        return text


def _standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    aside = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not aside.intersection(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


class Shapes:
    """Small grey images of a disc, a square, a triangle or a cross, at a random place, in noise; a sample is `(image, class)`.

    Image i is drawn from i alone, so any worker sees the same one.
    """

    classes = ("disc", "square", "triangle", "cross")

    def __init__(self, *, count: int, size: int = 32, first: int = 0) -> None:
        self.count, self.size, self.first = count, size, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(mix(2, self.first + index))
        label = int(torch.randint(len(self.classes), (), generator=generator))
        radius, column, row = (torch.rand(3, generator=generator) * torch.tensor([0.2, 0.4, 0.4]) + torch.tensor([0.2, 0.3, 0.3])).tolist()
        axis = torch.linspace(0, 1, self.size)
        x, y = (axis[None, :] - column) / radius, (axis[:, None] - row) / radius  # [1, size], [size, 1]
        inside = (
            x**2 + y**2 < 1,
            (x.abs() < 0.9) & (y.abs() < 0.9),
            (y < 0.8) & (x.abs() * 2 < y + 1),
            ((x.abs() < 0.3) | (y.abs() < 0.3)) & (x.abs() < 1) & (y.abs() < 1),
        )[label]
        noise = torch.randn(1, self.size, self.size, generator=generator)
        return inside.float() + 0.3 * noise, torch.tensor(label)


class SortedDigits:
    """Rows of random digits and the same digits in order: a sequence-to-sequence task; a sample is `(source, target)`.

    Rows have 2 to `longest` digits; places after the last one hold `padding`.
    """

    padding = 10
    begin = 11
    vocabulary = 12

    def __init__(self, *, count: int, longest: int = 12, first: int = 0) -> None:
        self.count, self.longest, self.first = count, longest, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(mix(3, self.first + index))
        digits = int(torch.randint(2, self.longest + 1, (), generator=generator))
        source = torch.full((self.longest,), self.padding)
        source[:digits] = torch.randint(10, (digits,), generator=generator)
        target = source.clone()
        target[:digits] = source[:digits].sort().values
        return source, target
