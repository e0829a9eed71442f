"""Which samples make up a step, and the example data sets."""

import random
from collections import Counter, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import Samples, Shapes, SortedDigits, StandardLibraryText, to_device
from atoll.errors import JobError


def as_list(samples: list[Any]) -> list[Any]:
    return samples


@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 2**32))
def test_every_step_is_full_and_every_epoch_complete(length: int, batch_size: int, seed: int) -> None:
    samples = Samples(range(length), as_list, seed, batch_size)
    steps = 3 * length  # batch_size epochs times three
    batches = [samples.batch(step) for step in range(steps)]
    assert all(len(batch) == batch_size for batch in batches)
    row = [index for batch in batches for index in batch]
    for epoch in range(0, len(row), length):
        assert sorted(row[epoch : epoch + length]) == list(range(length))


@given(st.integers(1, 30), st.integers(2, 20), st.integers(0, 50), st.data())
def test_parts_of_a_batch_make_up_the_batch(length: int, batch_size: int, step: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, batch_size - 1))
    samples = Samples(range(length), as_list, 0, batch_size)
    assert samples.batch(step, 0, cut) + samples.batch(step, cut, batch_size) == samples.batch(step)


def test_random_augmentation_gives_the_same_sample_whoever_loads_it() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> tuple[float, float, float]:
            return torch.rand(()).item(), random.random(), float(numpy.random.rand())

    whole = Samples(Noisy(), as_list, 5, 4).batch(3)
    assert Samples(Noisy(), as_list, 5, 4).batch(3, 2, 3) == whole[2:3]
    assert len(set(whole)) == 4
    assert Samples(Noisy(), as_list, 5, 4).batch(4) != whole


def test_batches_of_any_make_move_to_a_device() -> None:
    pair = namedtuple("pair", ["first", "second"])

    @dataclass
    class Record:
        tensor: torch.Tensor
        name: str

    tensor = torch.zeros(2)
    batch = {"a": [tensor, (tensor, 3)], "pair": pair(tensor, "x"), "record": Record(tensor, "r")}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == 3
    assert isinstance(moved["pair"], pair)
    assert moved["pair"].first.is_meta
    assert moved["record"].tensor.is_meta
    assert moved["record"].name == "r"
    assert not tensor.is_meta


def test_standard_library_text_is_one_long_text() -> None:
    short, long = (StandardLibraryText(sequence_length=n, split="eval") for n in (50, 5000))
    assert len(short) // 100 == len(long)
    inputs, targets = long[3]
    assert inputs.dtype == torch.int64
    assert inputs.shape == targets.shape == (5000,)
    assert torch.equal(inputs[1:], targets[:-1])
    assert torch.equal(torch.cat([short[i][0] for i in range(300, 400)]), inputs)
    assert torch.equal(short[399][1][-1], targets[-1])
    # the whole text, files joined by zero bytes
    files = b"".join(path.read_bytes() + b"\0" for path in short._files)
    assert bytes(torch.cat([long[i][0] for i in range(len(long))]).tolist()) == files[: 5000 * len(long)]


def test_standard_library_splits_are_apart_and_bad_arguments_explained() -> None:
    train, held_out = (StandardLibraryText(sequence_length=64, split=split) for split in ("train", "eval"))  # type: ignore[arg-type]
    assert not set(train._files) & set(held_out._files)
    assert len(train) > 10 * len(held_out) > 1000
    with pytest.raises(IndexError):
        train[len(train)]
    with pytest.raises(JobError, match="split must be 'train' or 'eval', got 'test'"):
        StandardLibraryText(sequence_length=64, split="test")  # type: ignore[arg-type]
    with pytest.raises(JobError, match="sequence_length must be at least 1"):
        StandardLibraryText(sequence_length=0)
    with pytest.raises(JobError, match="fewer than one sequence"):
        StandardLibraryText(sequence_length=10**10)


def test_shapes_are_reproducible_and_balanced() -> None:
    shapes = Shapes(count=400)
    image, label = shapes[7]
    assert image.shape == (1, 32, 32)
    assert torch.equal(image, Shapes(count=1, first=7)[0][0])
    counts = Counter(int(shapes[i][1]) for i in range(400))
    assert set(counts) == set(range(4))
    assert min(counts.values()) > 60
    assert 0 <= int(label) < len(Shapes.classes)


def test_sorted_digits_are_sorted() -> None:
    data = SortedDigits(count=50, longest=9)
    for i in range(50):
        source, target = data[i]
        digits = source[source != data.padding]
        assert 2 <= len(digits) <= 9
        assert torch.equal(target[: len(digits)], digits.sort().values)
        assert (target[len(digits) :] == data.padding).all()


def test_loading_is_timed_on_some_samples_for_the_whole_batch():
    loaded = []

    class Counted:
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            loaded.append(index)
            return index

    assert Samples(Counted(), list, 0, 500).loading_seconds(most=10) >= 0.0
    assert len(loaded) == 30
