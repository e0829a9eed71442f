"""`atoll run --mode swarm` up to the first process: what is refused, what is predicted."""

import json
import subprocess
from pathlib import Path

import pytest

from atoll.cli.main import run
from atoll.runtime.modes.swarm.supervisor import SwarmProcesses

SCRIPT = """import torch
from torch import nn
import atoll


class Hoarder(torch.optim.SGD):
    def __init__(self, params, lr):
        self.mine = list(params)
        super().__init__(self.mine, lr)


class Data:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.randn(6), torch.randn(3)


def loss(model, batch):
    inputs, wanted = batch
    return ((model(inputs) - wanted) ** 2).mean()


job = atoll.Job(
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    loss=loss,
    data=Data(),
    optimizer=lambda parameters: Hoarder(parameters, 0.1),
    batch_size=16,
    steps=2,
    name="small",
)
"""
PLAN = "plan v1 graph=small cluster=here mode=swarm schedule=1f1b batch=16 micro_batch=8{staleness}\nstage 0: layers 0-1: h/0=16\n"
HERE = """name = "here"
[[site]]
name = "h"
network = { bandwidth = "1 Mbit/s", latency = "1 ms" }
  [[site.host]]
  count = 2
  devices = [{ kind = "T4", count = 1 }]
"""
TWO = "plan v1 graph=small cluster=here mode={mode} schedule=1f1b batch=16 micro_batch=8\nstage 0: layers 0-1: h-0/0=8 h-1/0=8\n"


class ProcessStarted(BaseException):
    """Somebody tried to."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(*arguments: object, **options: object) -> None:
        raise ProcessStarted

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    Path("train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(("in_plan", "options"), [(" staleness=1", []), ("", ["--staleness", "1"])])
def test_an_optimizer_that_staleness_would_leave_behind_is_refused_before_anything_starts(
    in_plan: str, options: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.plan").write_text(PLAN.format(staleness=in_plan))
    assert run(["run", "train.py", "--plan", "p.plan", "--out", "out", *options]) == 2
    assert "Hoarder keeps its parameters in `mine` besides `param_groups`" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("mode", "words", "said"),
    [
        ("alone", "", "p.plan: mode alone runs on 1 device, the plan names more"),
        ("swarm", " sharded", "stage 0: a swarm's worker holds a whole stage by itself; leave out `sharded`"),
    ],
)
def test_a_plan_that_the_mode_cannot_run_is_refused_before_the_script_is_run(
    mode: str, words: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("raise SystemExit('it was run')")
    text = TWO.format(mode="lockstep").replace("layers 0-1:", f"layers 0-1{words}:")
    Path("p.plan").write_text(text)
    assert run(["run", "train.py", "--mode", mode, "--plan", "p.plan", "--out", "out"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "it was run" not in told


def test_without_staleness_it_is_started(folder: Path) -> None:
    Path("p.plan").write_text(PLAN.format(staleness=" staleness=1"))
    with pytest.raises(ProcessStarted):
        run(["run", "train.py", "--plan", "p.plan", "--out", "out", "--staleness", "0"])


@pytest.mark.parametrize("begun", [True, False])
def test_the_second_ctrl_c_too_says_how_to_go_on_where_something_was_begun(
    begun: bool, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(processes: SwarmProcesses) -> int:
        if begun:
            Path("out/journal.jsonl").touch()
        return 130

    monkeypatch.setattr(SwarmProcesses, "run", interrupted)
    Path("p.plan").write_text(PLAN.format(staleness=""))
    assert run(["run", "train.py", "--plan", "p.plan", "--out", "out"]) == 130
    assert (f"to go on: atoll run {folder / 'train.py'} --resume out" in capsys.readouterr().err) == begun


@pytest.mark.parametrize("mode", ["swarm", "lockstep"])  # of the plan: the command's goes before it
def test_the_prediction_is_that_of_the_staleness_asked_for(mode: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT.replace("Hoarder(parameters", "torch.optim.SGD(parameters"))
    Path("here.toml").write_text(HERE)
    Path("p.plan").write_text(TWO.format(mode=mode))
    steps, shown = {}, {}
    for staleness in ("0", "1"):
        out = Path(f"out{staleness}")
        with pytest.raises(ProcessStarted):
            run(["run", "train.py", "--mode", "swarm", "--plan", "p.plan", "-c", "here.toml", "--out", str(out), "--staleness", staleness])
        steps[staleness] = json.loads((out / "predicted.json").read_text())["step_seconds"]
        shown[staleness] = capsys.readouterr().out
        assert json.loads((out / "plan.json").read_text())["mode"] == "swarm"
    assert steps["1"] < steps["0"]
    assert "staleness=1" in shown["1"]
    assert "more memory a device" in " ".join(shown["1"].split())
    assert "staleness" not in shown["0"]


def test_a_resumed_run_that_is_planned_anew_keeps_its_staleness(folder: Path) -> None:
    Path("train.py").write_text(SCRIPT.replace("Hoarder(parameters", "torch.optim.SGD(parameters"))
    Path("here.toml").write_text(HERE)
    Path("p.plan").write_text(TWO.format(mode="swarm"))
    for options, staleness in (
        (["--plan", "p.plan", "--out", "out", "--staleness", "1"], 1),
        (["--resume", "out"], 1),
        (["--resume", "out", "--staleness", "0"], 0),
    ):
        with pytest.raises(ProcessStarted):
            run(["run", "train.py", "--mode", "swarm", "-c", "here.toml", *options])
        assert json.loads(Path("out/plan.json").read_text())["staleness"] == staleness


@pytest.mark.parametrize("mode", ["swarm", "lockstep"])
def test_a_site_that_says_what_may_leave_it_is_not_run_with_another_by_a_mode_that_does_not_look(
    mode: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule that is read and not kept would be worse than none."""
    site = '[[site]]\nname = "{0}"\nmay_send = ["updates"]\n[[site.host]]\nname = "{0}-0"\ndevices = [{{ kind = "T4" }}]\n'
    link = '[default_link]\nbandwidth = "100 Mbit/s"\nlatency = "20 ms"\n'
    Path("two.toml").write_text('name = "two"\n' + link + site.format("a") + site.format("b"))
    plan = TWO.format(mode=mode).replace("cluster=here", "cluster=two").replace("h-0/0", "a-0/0").replace("h-1/0", "b-0/0")
    Path("p.plan").write_text(plan)
    assert run(["run", "train.py", "--mode", mode, "--plan", "p.plan", "--cluster", "two.toml", "--out", "out"]) == 2
    assert f"site 'a' says what may leave it (may_send), and mode {mode} does not check what its processes send" in capsys.readouterr().err
    assert not Path("out").exists()
