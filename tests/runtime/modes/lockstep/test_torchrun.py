"""A plan of several hosts under torchrun's variables: found by rank 0 alone, the same for everybody, or refused."""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from atoll.events import StepFinished, read_events
from tests.warm import run_warm

pytestmark = pytest.mark.timeout(600)

SCRIPT = """
import sys
import torch
from torch import nn
import atoll

class Data:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=draw), torch.randn(3, generator=draw)

chance = float(__import__("os").environ.get("CHANCE", 0))

def loss(model, batch):
    inputs, wanted = batch
    return ((model(inputs) - wanted) ** 2).mean()

job = atoll.Job(
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(chance), nn.Linear(8, 3)), loss=loss, data=Data(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1), batch_size=16, steps=3, name="small",
)
if __name__ == "__main__":
    result = job.run(out=sys.argv[1])
    torch.save(result.model.state_dict(), f"{sys.argv[1]}/{__import__('os').environ.get('RANK', 'alone')}.pt")
"""
PLAN = """plan v1 graph=small cluster=two mode=lockstep schedule=1f1b batch=16 micro_batch=4
stage 0: layers 0-0: oslo/0=16
stage 1: layers 1-1: rome/0=16
"""


def run(folder: Path, out: str, plans: tuple[str | None, str | None], chances: tuple[str, str] = ("0", "0")) -> list[tuple[int, str]]:
    """Two processes as torchrun would start them, each with its own ATOLL_PLAN; how each ended, and what it complained."""
    (folder / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environs = []
    for rank, plan in enumerate(plans):
        role = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = {**os.environ, **{name: str(value) for name, value in role.items()}, "OMP_NUM_THREADS": "1", "CHANCE": chances[rank]}
        if plan is not None:
            environ["ATOLL_PLAN"] = plan
        environs.append(environ)
    with ThreadPoolExecutor(2) as both:
        ended = both.map(lambda environ: run_warm([sys.executable, "train.py", out], cwd=folder, env=environ), environs)
        return [(process.returncode, process.stderr) for process in ended]


def losses(out: Path) -> list[float]:
    return [event.loss for event in read_events(out / "events.jsonl") if isinstance(event, StepFinished)]


@pytest.mark.parametrize("other", [None, "not-on-this-host.plan", "p.plan"])
def test_a_plan_that_rank_0_has_is_everybodys(other: str | None, tmp_path: Path) -> None:
    (tmp_path / "p.plan").write_text(PLAN)
    ended = run(tmp_path, "out", ("p.plan", other))
    assert [code for code, _ in ended] == [0, 0], ended
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    assert run_warm([sys.executable, "train.py", "alone"], cwd=tmp_path, env=environ).returncode == 0
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    expected = torch.load(tmp_path / "alone" / "alone.pt")
    for rank in range(2):
        for name, value in torch.load(tmp_path / "out" / f"{rank}.pt").items():
            assert torch.allclose(value, expected[name], atol=1e-5), f"what rank {rank} has of the trained model"


def test_another_plan_than_that_of_rank_0_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.plan").write_text(PLAN)
    (tmp_path / "q.plan").write_text(PLAN.replace("micro_batch=4", "micro_batch=8"))
    ended = run(tmp_path, "out", ("p.plan", "q.plan"))
    assert all(code for code, _ in ended)
    assert "this rank was given another plan than rank 0; give all ranks the same, or rank 0 alone" in ended[1][1]


def test_a_rank_that_captured_other_layers_is_refused(tmp_path: Path) -> None:
    """Of the same shapes, operators and weights: only the probability of a dropout differs."""
    (tmp_path / "p.plan").write_text(PLAN)
    ended = run(tmp_path, "out", ("p.plan", None), chances=("0.1", "0.2"))
    assert all(code for code, _ in ended)
    assert "rank 1 captured another program than rank 0" in ended[1][1]
