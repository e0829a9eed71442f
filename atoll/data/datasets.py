"""Example data sets that need no download: text, pictures and a task from sequence to sequence."""

import sysconfig
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from atoll.errors import JobError
from atoll.randomness import mix

__all__ = ["Shapes", "SortedDigits", "StandardLibraryText"]


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
