"""Streams are read in order, by whoever needs some of their samples; a run goes on in one where it was, exactly."""

import random
import weakref
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from atoll.data import StreamSamples
from atoll.errors import JobError, JobFailedError
from atoll.events import AnyEvent, Note, StepFinished, StopTraining, read_events
from atoll.job import Job


class Rows(IterableDataset[int]):
    """Numbers in blocks of five that are shuffled, other ones in every epoch; counts what is read of it."""

    def __init__(self, count: int = 13) -> None:
        self.count, self.epoch, self.read = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.count, 5):
            for number in random.Random(100 * self.epoch + start).sample(
                range(start, min(start + 5, self.count)), min(5, self.count - start)
            ):
                self.read += 1
                yield 1000 * self.epoch + number


class StatefulRows(Rows):
    """Says where it is itself, as torchdata's data sets do."""

    done = 0

    def __iter__(self) -> Iterator[int]:
        for number in islice(super().__iter__(), self.done, None):
            self.done += 1
            yield number
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.epoch = state["done"], state["epoch"]


class CountingIterator:
    """An iterator that says where it is, of a stream that does not."""

    def __init__(self, stop: int) -> None:
        self.at, self.stop = 0, stop

    def __iter__(self) -> "CountingIterator":
        return self

    def __next__(self) -> int:
        if self.at == self.stop:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Counted:
    def __iter__(self) -> CountingIterator:
        return CountingIterator(7)


def plain(count: int) -> list[int]:
    """What a loop over epochs sees."""
    rows = Rows()
    epochs = (rows for epoch in range(100) if rows.set_epoch(epoch) is None)
    return list(islice(chain.from_iterable(epochs), count))


@pytest.mark.parametrize("make", [Rows, StatefulRows])
def test_any_batch_is_that_of_a_plain_loop_over_epochs(make: type[Rows]) -> None:
    expected = plain(60)
    samples = StreamSamples(make(), list, 0, 4)
    for step in (0, 1, 1, 2, 8, 7, 0, 9, 3):  # forwards, again, and back
        assert samples.batch(step) == expected[4 * step : 4 * step + 4]
    assert samples.batch(5, 2, 3) == [expected[22]]


def test_a_state_is_that_of_its_step_though_others_have_read_ahead() -> None:
    """As a swarm's feeder does, which has the next step's first samples loaded before it asks for this one's last."""
    samples = StreamSamples(StatefulRows(), list, 0, 4)
    samples.reader.load(samples.part(2, 0, 2, last=False))
    samples.reader.load(samples.part(3, 0, 2, last=False))
    batch, state = samples.reader.load(samples.part(2, 2, 4, last=True))
    assert state["position"] == 12
    later = StreamSamples(StatefulRows(), list, 0, 4)
    later.go_on_from(state)
    assert later.reads_before(12) == 0
    assert later.batch(3) == plain(60)[12:16]
    assert batch == plain(60)[10:12]


@pytest.mark.parametrize(("make", "length"), [(StatefulRows, 13), (Counted, 7)])
def test_a_state_is_gone_on_from_without_reading_what_came_before(make: Any, length: int) -> None:
    expected = StreamSamples(make(), list, 0, 4).batch(9)
    first = StreamSamples(make(), list, 0, 4)
    _, state = first.reader.load(first.part(8, 0, 2, last=True))  # a rank that needs but two samples of the step
    data = make()
    later = StreamSamples(data, list, 0, 4)
    later.go_on_from(state)
    assert later.reads_before(36) == 0
    assert later.batch(9) == expected
    if isinstance(data, Rows):
        assert data.read <= length + 1  # of the epoch it is in and the one it reaches into; not the two before
    assert later.batch(0) == first.batch(0), "and back to the beginning"
    for step in range(8):  # as what captures a job reads it
        later.batch(step)
    assert later.reads_before(36) == 0, "what others have said is not forgotten"


def test_streams_without_a_state_are_read_up_to_where_a_run_goes_on() -> None:
    rows = Rows()
    later = StreamSamples(rows, list, 0, 4)
    assert later.reads_before(36) == 36
    assert later.batch(9) == plain(40)[36:]
    assert rows.read == 40


def test_random_samples_are_the_same_whoever_reads_them() -> None:
    def noisy() -> Iterator[float]:
        for _ in range(5):
            yield random.random() + float(torch.rand(()))

    job = Job(**{**JOB, "data": noisy, "collate_fn": list})
    whole = [job.samples.batch(step) for step in range(3)]
    again = Job(**{**JOB, "data": noisy, "collate_fn": list}).samples
    assert again.batch(2, 1, 3) == whole[2][1:3]
    assert len(set(chain.from_iterable(whole))) == 12


class Lines(IterableDataset[int]):
    """Of a file that is open while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[Any] = []

    def __iter__(self) -> Iterator[int]:
        with self.path.open() as file:
            self.opened.append(weakref.ref(file))
            for line in file:
                yield int(line)


def test_a_stream_that_is_let_go_of_has_nothing_open_and_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    path.write_text("\n".join(map(str, range(30))))
    lines = Lines(path)
    samples = StreamSamples(lines, torch.tensor, 0, 4)
    assert samples.batch(1).tolist() == [4, 5, 6, 7]
    (file,) = lines.opened
    assert file() is not None
    samples.forget()
    assert file() is None
    assert samples.batch(0).tolist() == [0, 1, 2, 3]
    assert samples.batch(2).tolist() == [8, 9, 10, 11]


class Once:
    def __init__(self) -> None:
        self.left = list(range(5))

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop()


def test_what_cannot_be_read_again_is_refused() -> None:
    with pytest.raises(JobError, match="a generator can be read only once; give a callable that makes it"):
        StreamSamples((i for i in range(3)), list, 0, 2).batch(0)
    with pytest.raises(JobError, match="the stream ended after 5 samples and gives none when it is read again"):
        StreamSamples(Once(), list, 0, 4).batch(1)
    with pytest.raises(JobError, match="the stream is empty"):
        StreamSamples(Rows(0), list, 0, 4).batch(0)


def features(numbers: list[int]) -> Tensor:
    return torch.tensor([[n % 7, n % 3, n / 1000] for n in numbers])


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor((model(batch).squeeze(-1) - batch.sum(-1)).square().mean())


JOB: dict[str, Any] = {
    "model": lambda: nn.Linear(3, 1),
    "loss": loss,
    "data": StatefulRows,
    "optimizer": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "batch_size": 4,
    "steps": 12,
    "collate_fn": features,
}


def reference() -> list[float]:
    model = Job(**JOB).build_model()
    optimizer, losses, row = torch.optim.AdamW(model.parameters(), 0.01), [], plain(48)
    for step in range(12):
        value = loss(model, features(row[4 * step : 4 * step + 4]))
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    return losses


def stop_after(step: int) -> Any:
    def stop(event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == step:
            raise StopTraining

    return stop


@pytest.mark.parametrize("make", [Rows, StatefulRows])
def test_a_run_alone_goes_on_in_a_stream_where_it_was(make: type[Rows], tmp_path: Path) -> None:
    Job(**{**JOB, "data": make, "callbacks": [stop_after(5)]}).run(out=tmp_path / "run", progress=False, device="cpu")
    result = Job(**{**JOB, "data": make}).run(resume=tmp_path / "run", progress=False, device="cpu")
    assert list(result.losses) == reference()
    told = [event.message for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Note)]
    assert [message.startswith("20 samples are read and left out") for message in told] == [True] * (make is Rows)


def test_a_loader_of_a_stream_and_a_stream_to_evaluate_on() -> None:
    loader: DataLoader[int] = DataLoader(Rows(), batch_size=4, collate_fn=features)
    job = Job(**{**JOB, "data": loader, "batch_size": None, "eval_data": Rows, "micro_batch_size": 2})
    result = job.run(progress=False, device="cpu")
    assert list(result.losses) == pytest.approx(reference(), rel=1e-5)
    assert result.model is not None
    with torch.no_grad():
        assert result.evaluations[-1].loss == pytest.approx(float(loss(result.model, features(list(range(13))))), rel=1e-5)


def test_an_error_names_the_sample() -> None:
    def rows() -> Iterator[int]:
        yield from range(6)
        raise OSError("the disk is gone")

    with pytest.raises(JobFailedError, match=r"step 2: loading the batch failed: OSError: the disk is gone \(sample 6 of the stream\)"):
        Job(**{**JOB, "data": rows}).run(progress=False, device="cpu")
