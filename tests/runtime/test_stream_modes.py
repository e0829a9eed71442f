"""A stream in every mode: unequal shares of its samples, a run that goes on under another plan, all as in a plain loop over it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.events import Evaluated, Note, StepFinished, read_events
from atoll.graph.capture import capture
from atoll.randomness import mix

from .modes.lockstep.equality_cases import plan_of
from .stream_job import BATCH, LENGTH, STEPS, Stream, job, loss

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).parent / "stream_job.py"


def rows(purpose: int, count: int) -> list[Tensor]:
    """The loop over epochs as one would write it, with the generators seeded as docs/job.md says."""
    stream, found = Stream(), list[Tensor]()
    epoch = 0
    while len(found) < count:
        stream.set_epoch(epoch)
        iterator = iter(stream)
        for _ in range(LENGTH):
            torch.manual_seed(mix(job.seed, purpose, len(found)))
            found.append(next(iterator))
        assert next(iterator, None) is None
        epoch += 1
    return found[:count]


def plain() -> tuple[list[float], float]:
    model = job.build_model("cpu")
    optimizer, losses, seen = torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3), [], rows(1, STEPS * BATCH)
    for step in range(STEPS):
        value = loss(model, torch.stack(seen[step * BATCH : (step + 1) * BATCH]))
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    with torch.no_grad():
        return losses, float(loss(model, torch.stack(rows(7, LENGTH))))


def run_ranks(plan: Path, *arguments: str | Path) -> None:
    """Two processes, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ATOLL_PLAN": str(plan)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            env={**os.environ, **environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        said = process.communicate()[1]
        assert process.returncode == 0, said[-5000:]


def test_a_stream_is_shared_unequally_and_gone_on_with_under_another_plan(tmp_path: Path) -> None:
    run, graph = tmp_path / "run", capture(job)
    plans = [tmp_path / "shares.json", tmp_path / "pipeline.json"]
    plans[0].write_text(plan_of(graph, "2 | a=5 b=3", BATCH).to_json(), encoding="utf-8")
    plans[1].write_text(plan_of(graph, "4 | a=8 | b=8", BATCH).to_json(), encoding="utf-8")
    run_ranks(plans[0], "5", "out", run)
    run_ranks(plans[1], "9", "resume", run)
    result = job.run(resume=run, progress=False)

    losses, evaluated = plain()
    events = list(read_events(run / "events.jsonl"))
    assert [event.step for event in events if isinstance(event, StepFinished)] == list(range(1, STEPS + 1)), "every step once"
    assert [event.loss for event in events if isinstance(event, StepFinished)] == pytest.approx(losses, rel=1e-5)
    assert list(result.losses) == pytest.approx(losses, rel=1e-5)
    assert result.evaluations[-1].loss == pytest.approx(evaluated, rel=1e-5)
    told = [event for event in events if isinstance(event, Evaluated)]
    assert [event.samples for event in told] == [LENGTH] * 3
    assert not [event for event in events if isinstance(event, Note)], "states are saved: nothing is read to be left out"
    waits = [event.data_seconds for event in events if isinstance(event, StepFinished)]
    assert all(seconds is not None and seconds >= 0 for seconds in waits)
