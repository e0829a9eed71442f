"""Checkpoints between real processes over Gloo."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import torch

from atoll.runtime.checkpoint import Checkpointer

from .layouts import tensors
from .processes import IDENTITY, held_by


def _run(directory: Path, ranks: int, scenario: str) -> list[tuple[int, list[str]]]:
    """Exit code and what it said, of each rank."""
    command = [sys.executable, "-m", "tests.runtime.checkpoint.processes"]
    root = Path(__file__).parents[3]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(directory), scenario], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    results = []
    for process in processes:
        output, errors = process.communicate(timeout=200)
        assert process.returncode in (0, -signal.SIGKILL), errors[-3000:]
        results.append((process.returncode, json.loads(output) if process.returncode == 0 else []))
    return results


def test_any_layout_on_any_number_of_ranks(tmp_path: Path) -> None:
    results = _run(tmp_path, 3, "reshard")
    assert all(len(said) == 8 for _, said in results)


def test_a_failure_on_one_rank_is_everybodys(tmp_path: Path) -> None:
    results = _run(tmp_path, 2, "failures")
    assert results[0] == results[1]
    late, final, loaded, damaged = results[0][1]
    assert late.startswith("rank 1: ")
    assert "File too large" in late
    assert final.startswith("step 3: the last checkpoint could not be saved: rank 1: ")
    assert loaded == "loaded 1"
    assert "safetensors: it has" in damaged
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-00000001"]


def test_a_rank_is_killed_while_it_writes(tmp_path: Path) -> None:
    results = _run(tmp_path, 3, "killed")
    assert [code for code, _ in results] == [0, 0, -signal.SIGKILL]
    for _, said in results[:2]:
        assert "another rank is gone" in said[0]
    blank = {name: torch.zeros_like(value) for name, value in tensors(0).items()}
    held = held_by(0, 0, 1, blank, trained=False)
    loaded = Checkpointer(tmp_path / "run", identity=IDENTITY).load(held)
    assert loaded is not None
    assert loaded.step == 1
    assert all(torch.equal(part.tensor.view(-1), tensors(0)[part.name].view(-1)) for part in held)
    assert not list((tmp_path / "run").glob("*.partial")), "what the crash left is cleaned"
