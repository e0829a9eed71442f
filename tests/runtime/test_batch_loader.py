"""Worker processes load what this process would, in the same order; they say what goes wrong, and never outlive a run."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from atoll.blame import own_frames
from atoll.data import BatchRequest, Samples
from atoll.errors import JobError, JobFailedError
from atoll.events import RunFinished, StepFinished, read_events
from atoll.runtime.batch_loader import BatchLoader

pytestmark = pytest.mark.timeout(300)


class Augmented:
    """Draws from every generator; one sample cannot be read."""

    broken = 11

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, Tensor, float, float]:
        if index == self.broken:
            raise KeyError(index)
        return index, torch.rand(3), random.random(), float(numpy.random.rand())


def rows(samples: list[Any]) -> list[Any]:
    """Tensors and plain values; a batch of one cannot be sent."""
    return samples if len(samples) > 1 else [lambda: samples]


def requests(samples: Samples) -> list[BatchRequest]:
    """Batches of different sizes, without the broken sample."""
    good = [position for position in range(60) if samples.index(position) != Augmented.broken]
    return [samples.request(good[start : start + size]) for start, size in ((0, 5), (5, 2), (7, 6), (40, 3), (2, 4), (20, 2))]


def test_workers_load_what_this_process_would() -> None:
    samples = Samples(Augmented(), rows, 5, 4)
    wanted, state = requests(samples), torch.get_rng_state()
    expected = [loaded.batch for loaded in BatchLoader(samples, 0).batches(wanted)]
    loader = BatchLoader(samples, 2)
    try:
        for _ in range(2):  # the same workers again
            assert str([loaded.batch for loaded in loader.batches(wanted)]) == str(expected)
        assert torch.equal(torch.get_rng_state(), state)
        bad = next(position for position in range(20) if samples.index(position) == Augmented.broken)
        loading = loader.batches([wanted[0], samples.request([bad, bad])])
        assert next(loading).seconds > 0
        with pytest.raises(KeyError, match="11") as raised:
            next(loading)
        assert raised.value.__notes__ == ["sample 11 of 20"]
        assert [(frame.name, frame.line) for frame in own_frames(raised.value)] == [("__getitem__", "raise KeyError(index)")]
        with pytest.raises(Exception, match="pickle"):
            next(loader.batches([samples.request([3])]))
    finally:
        loader.close()


def test_a_worker_that_died_after_it_made_a_batch_is_told_of_as_one_that_died_before() -> None:
    samples = Samples(Augmented(), rows, 5, 4)
    loader = BatchLoader(samples, 1)
    try:
        wanted = requests(samples)
        made = loader.submit(wanted[0])
        made.result()
        assert loader._pool is not None
        for worker in list((loader._pool._processes or {}).values()):
            worker.kill()
            worker.join()
        with pytest.raises(JobFailedError, match="a worker process that loads data ended abruptly"):
            loader.result(made)
        with pytest.raises(JobFailedError, match="a worker process that loads data ended abruptly"):
            list(loader.batches(wanted))
    finally:
        loader.close()


def test_what_cannot_be_sent_is_refused() -> None:
    loader = BatchLoader(Samples(range(3), lambda samples: samples, 0, 2), 1)
    with pytest.raises(
        JobError, match=r"the data cannot be sent to worker processes: .*lambda.*; define its class and collate_fn at the top"
    ):
        next(loader.batches([loader.samples.request([0])]))


SCRIPT = """
import os, sys
from pathlib import Path
import torch
from torch import nn
import atoll

class Data:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        (Path(sys.argv[1]) / str(os.getpid())).touch()  # who loads
        return torch.full((2,), float(index))

def begun(event):
    if type(event).__name__ == "StepFinished":
        Path(sys.argv[1], "begun").touch()

job = atoll.Job(
    model=lambda: nn.Linear(2, 1), loss=lambda model, batch: model(batch).square().mean(), data=Data(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3), batch_size=4, steps=10**9, num_workers=1, callbacks=[begun],
)
if __name__ == "__main__":
    torch.set_num_threads(1)
    job.run(out=Path(sys.argv[1], "run"), progress=False)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_run(ending: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, which the terminal sends to all of them, and SIGTERM, as systemd and Slurm do, end the run after its step; a killed run
    leaves nobody behind."""
    (tmp_path / "train.py").write_text(SCRIPT)
    run = subprocess.Popen([sys.executable, "train.py", str(tmp_path)], cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE)
    try:
        while not (tmp_path / "begun").exists():  # fails by the test's time-out
            assert run.poll() is None, run.communicate()
            time.sleep(0.02)
        workers = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit() and int(path.name) != run.pid]
        assert len(workers) == 1
        if ending != signal.SIGKILL:
            os.killpg(run.pid, ending)
        else:
            run.kill()
        said = run.communicate()[1].decode()
        while any(is_alive(pid) for pid in workers):
            time.sleep(0.02)
    finally:
        run.kill()
    if ending != signal.SIGKILL:
        assert run.returncode == 0, said
        events = list(read_events(tmp_path / "run" / "events.jsonl"))
        steps = [event.step for event in events if isinstance(event, StepFinished)]
        (finished,) = (event for event in events if isinstance(event, RunFinished))
        assert (finished.reason, finished.steps) == ("interrupted", steps[-1])
