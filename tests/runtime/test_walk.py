"""One run walks through the modes: alone, a pipeline, a swarm with other stages, sharded weights, alone again.

Losses, weights and Adam's moments are those of a plain PyTorch loop that was never stopped.
"""

import dataclasses
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from atoll.data import Samples
from atoll.events import CheckpointSaved, StepFinished, read_events
from atoll.graph.capture import capture
from atoll.plan import Plan
from atoll.runtime.checkpoint.directory import find
from tests.warm import run_warm

from .modes.lockstep.equality_cases import plan_of
from .walk_job import BATCH, STEPS, Data, job, loss, warm

pytestmark = pytest.mark.timeout(1200)

SCRIPT = Path(__file__).parent / "walk_job.py"
TOLERANCE = 1e-5


def plain() -> tuple[list[float], nn.Module, torch.optim.AdamW]:
    """The loop as one would write it."""
    model = job.build_model("cpu")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm)
    samples, losses = Samples(Data(), job.collate_fn, job.seed, BATCH), []
    for step in range(STEPS):
        found = loss(model, samples.batch(step))
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(float(found.detach()))
    return losses, model, optimizer


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    graph, folder = capture(job), tmp_path_factory.mktemp("plans")
    swarm = msgspec.structs.replace(plan_of(graph, "2 | a=8 | b=8 | c=8", BATCH), mode="swarm")
    made: dict[str, Plan] = {"pipeline": plan_of(graph, "4 | a=8 | b=8", BATCH), "swarm": swarm}
    made["sharded"] = plan_of(graph, "8 | sharded: (a b)=4,4", BATCH)
    for name, plan in made.items():
        (folder / f"{name}.json").write_text(plan.to_json(), encoding="utf-8")
    return {name: folder / f"{name}.json" for name in made}


def atoll_run(*arguments: str | Path) -> None:
    command = [sys.executable, "-c", "from atoll.cli import main; main()", "run", *map(str, arguments)]
    done = run_warm(command)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {f"{names[id(p)]}: {key}": torch.as_tensor(value) for p, state in optimizer.state.items() for key, value in state.items()}


def test_a_run_walks_through_the_modes(plans: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    dataclasses.replace(job, steps=5).run(out=run, progress=False)
    atoll_run(SCRIPT, "--resume", run, "--mode", "lockstep", "--plan", plans["pipeline"], "--", "10")
    atoll_run(SCRIPT, "--resume", run, "--mode", "swarm", "--plan", plans["swarm"], "--", "15")
    atoll_run(SCRIPT, "--resume", run, "--mode", "lockstep", "--plan", plans["sharded"], "--", "20")
    result = job.run(resume=run, progress=False)

    losses, model, optimizer = plain()
    events = list(read_events(run / "events.jsonl"))
    assert [event.step for event in events if isinstance(event, StepFinished)] == list(range(1, STEPS + 1)), "every step once"
    assert [event.loss for event in events if isinstance(event, StepFinished)] == pytest.approx(losses, rel=TOLERANCE)
    assert result.losses == pytest.approx(losses, rel=TOLERANCE)
    assert {5, 10, 15, 20, 25} <= {event.step for event in events if isinstance(event, CheckpointSaved)}
    assert result.model is not None
    assert result.optimizer is not None
    for name, value in model.state_dict().items():
        assert torch.allclose(result.model.state_dict()[name], value, rtol=TOLERANCE, atol=TOLERANCE), name
    expected, found = moments(model, optimizer), moments(result.model, result.optimizer)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE), name
    assert find(run / "checkpoints", None) == run / "checkpoints" / "step-00000025"
