"""A stream in lockstep: unequal shares of its samples, a run that goes on under another plan, all as in a plain loop over it."""

import os
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from atoll.events import Evaluated, Note, StepFinished, read_events
from atoll.graph.capture import capture
from atoll.job import Job
from atoll.randomness import mix
from tests.process_group import fork_ranks

from .modes.lockstep.equality_cases import plan_of

pytestmark = pytest.mark.timeout(600)

BATCH, STEPS, LENGTH = 8, 12, 21


class Stream(IterableDataset[Tensor]):
    """Rows with noise drawn from the global generator, shuffled anew in every epoch; it says where it is."""

    def __init__(self) -> None:
        self.epoch, self.done = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for index in random.Random(self.epoch).sample(range(LENGTH), LENGTH)[self.done :]:
            self.done += 1
            yield torch.tensor([index / LENGTH, index % 4, self.epoch]) + 0.1 * torch.rand(3)
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor((model(batch).squeeze(-1) - batch.sum(-1)).square().mean())


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


job = Job(
    name="stream",
    model=build,
    loss=loss,
    data=Stream,
    eval_data=Stream,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.02, eps=1e-3),
    batch_size=BATCH,
    steps=STEPS,
)


def rows(purpose: int, count: int) -> list[Tensor]:
    """The loop over epochs as one would write it, with the generators seeded as docs/job.md says."""
    stream, found = Stream(), list[Tensor]()
    for epoch in range(count):
        stream.set_epoch(epoch)
        iterator = iter(stream)
        for _ in range(LENGTH):
            torch.manual_seed(mix(job.seed, purpose, len(found)))
            found.append(next(iterator))
        assert next(iterator, None) is None
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


def train(rank: int, plans: list[Path], ports: list[int], run: Path) -> None:
    """Five steps under one plan, four more under the other; workers are started alone, below."""
    for plan, port, steps, where in zip(plans, ports, (5, 9), ("out", "resume"), strict=True):
        role = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in role.items()} | {"ATOLL_PLAN": str(plan)})
        replace(job, steps=steps).run(**{where: run}, progress=False)  # type: ignore[arg-type]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_a_stream_is_shared_unequally_and_gone_on_with_under_another_plan(tmp_path: Path) -> None:
    run, graph = tmp_path / "run", capture(job)
    plans = [tmp_path / "shares.json", tmp_path / "pipeline.json"]
    plans[0].write_text(plan_of(graph, "2 | a=5 b=3", BATCH).to_json(), encoding="utf-8")
    plans[1].write_text(plan_of(graph, "4 | a=8 | b=8", BATCH).to_json(), encoding="utf-8")
    assert fork_ranks(2, train, plans, free_ports(2), run) == 0
    result = replace(job, num_workers=1).run(resume=run, progress=False, device="cpu")

    losses, evaluated = plain()
    events = list(read_events(run / "events.jsonl"))
    assert [event.step for event in events if isinstance(event, StepFinished)] == list(range(1, STEPS + 1)), "every step once"
    assert [event.loss for event in events if isinstance(event, StepFinished)] == pytest.approx(losses, rel=1e-5)
    assert list(result.losses) == pytest.approx(losses, rel=1e-5)
    assert result.evaluations[-1].loss == pytest.approx(evaluated, rel=1e-5)
    assert [event.samples for event in events if isinstance(event, Evaluated)] == [LENGTH] * 3
    assert not [event for event in events if isinstance(event, Note)], "states are saved: nothing is read to be left out"
    waits = [event.data_seconds for event in events if isinstance(event, StepFinished)]
    assert all(seconds is not None and seconds >= 0 for seconds in waits)
