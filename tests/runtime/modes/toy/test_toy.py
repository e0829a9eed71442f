"""Adding a mode is one folder and one registration: a mode that lives here only is planned, run, resumed and reported on by `atoll`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import atoll
from tests.warm import run_warm

HERE = Path(__file__).parent
REGISTRATION = "[atoll.modes]\ntoy = toy_mode:TOY\n"
SCRIPT = """import sys
import torch
from torch import nn
import atoll


class Data:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randn(3, generator=generator)


def loss(model, batch):
    inputs, wanted = batch
    return ((model(inputs) - wanted) ** 2).mean()


job = atoll.Job(
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    loss=loss,
    data=Data(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01),
    batch_size=16,
    steps=int(sys.argv[1]) if sys.argv[1:] else 4,
    name="small",
)
"""
CLUSTER = """name = "two"
[[site]]
name = "h"
network = { bandwidth = "1 Gbit/s", latency = "1 ms" }
  [[site.host]]
  count = 2
  devices = [{ kind = "T4", count = 1 }]
"""


class Shell:
    """`atoll` as somebody uses it who has the toy's package installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = folder / "installed" / "toy_mode-1.0.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-mode\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(REGISTRATION)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "two.toml").write_text(CLUSTER)
        self.environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(package.parent)])}

    def __call__(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from atoll.cli import main; main()", *arguments]
        done = run_warm(command, cwd=self.folder, env=self.environ)
        assert done.returncode == code, done.stderr
        return done


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("toy"))


def test_it_is_offered_with_its_option(shell: Shell) -> None:
    told = " ".join(shell("run", "--help").stdout.replace("│", " ").split())
    assert "toy: one process that steps back for others" in told
    assert "--niceness" in told


def test_it_is_planned_by_its_rules_where_it_is_asked_for(shell: Shell) -> None:
    answer = json.loads(shell("plan", "train.py", "--cluster", "two.toml", "--mode", "toy", "--json", "-o", "toy.plan").stdout)
    best = answer["plans"][0]
    assert (best["mode"], best["reasons"][0], len(best["stages"])) == ("toy", "toy: asked for", 1)
    assert "micro_batch=16" in best["text"]  # whole batches only
    chosen = json.loads(shell("plan", "train.py", "--cluster", "two.toml", "--json").stdout)["plans"][0]
    assert chosen["mode"] == "lockstep"  # the toy was looked at, and keeps too little of the time
    (shell.folder / "bad.plan").write_text((shell.folder / "toy.plan").read_text().replace("micro_batch=16", "micro_batch=8"))
    refused = shell("run", "train.py", "--plan", "bad.plan", "--out", "bad", code=2).stderr
    assert "bad.plan: the toy takes whole batches" in refused
    assert not (shell.folder / "bad").exists()


def test_it_runs_and_reports_and_goes_on_in_other_modes_and_they_in_it(shell: Shell) -> None:
    done = shell("run", "train.py", "--cluster", "two.toml", "--mode", "toy", "--niceness", "3", "--out", "run", "--", "2")
    assert "starting a polite process on this machine" in done.stderr
    assert "it was polite" in done.stdout
    assert json.loads((shell.folder / "run" / "run.json").read_text())["options"] == {"niceness": 3}
    assert "the prediction is of a device of its own" in " ".join(done.stdout.split())
    report = json.loads(shell("report", "run", "--json").stdout)
    niceness = min(19, os.nice(0) + 3)  # these tests may be running at a lower priority themselves
    assert (report["mode"], report["toy"]) == ("toy", {"niceness": niceness, "own_process": True})
    shell("run", "train.py", "--resume", "run", "--", "4")  # as the toy, with its option
    assert json.loads((shell.folder / "run" / "run.json").read_text())["mode"] == "toy"
    shell("run", "train.py", "--resume", "run", "--mode", "alone", "--", "6")
    whole = shell("run", "train.py", "--alone", "--out", "whole", "--", "6")
    assert "done: 6 steps" in whole.stderr
    losses = [json.loads(shell("report", name, "--json").stdout)["losses"] for name in ("run", "whole")]
    assert losses[0] == losses[1]


def test_what_it_refuses_is_told_before_anything_is_written(shell: Shell) -> None:
    for options, said in (
        (("--mode", "toy", "--niceness", "13"), "--niceness 13: brings bad luck"),
        (("--mode", "toy", "--staleness", "1"), "`--staleness` needs `--mode swarm`: only the swarm overlaps gradient reduction"),
        (("--niceness", "2"), "`--niceness` needs `--mode toy`: only the toy's process has a priority of its own"),
    ):
        assert said in shell("run", "train.py", "--cluster", "two.toml", "--out", "never", *options, code=2).stderr
    assert not (shell.folder / "never").exists()


def test_nothing_in_atoll_knows_of_it() -> None:
    sources = Path(atoll.__file__).parent.rglob("*.py")
    assert not [path for path in sources if '"toy"' in path.read_text(encoding="utf-8") or "toy_mode" in path.read_text(encoding="utf-8")]
