"""`atoll run` and modes: which is meant, whose options are whose, and what a run of one process leaves behind."""

import json
from pathlib import Path

import msgspec
import pytest

from atoll.cli.main import run
from atoll.cli.mode_options import apply_to_plan, chosen_options
from atoll.errors import JobError
from atoll.plan import parse_plan
from atoll.plan.modes import mode_rules
from atoll.plan.modes.swarm import SwarmOptions
from atoll.runtime.run_directory import RunSettings
from atoll.script import load_job

from .test_swarm import HERE, SCRIPT, TWO

TRAINABLE = SCRIPT.replace("Hoarder(parameters, 0.1)", "torch.optim.SGD(parameters, 0.1)")
PLAN = parse_plan("plan v1 graph=g cluster=c mode=swarm batch=4 micro_batch=2 staleness=1\nstage 0: layers 0-1: a/0=2 b/0=2\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINABLE)
    Path("here.toml").write_text(HERE)
    Path("p.plan").write_text(TWO.format(mode="lockstep"))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--alone", "--mode", "swarm"], "--alone: short for `--mode alone`, but --mode swarm is given"),
        (["--mode", "lockstep"], "give the devices with --cluster FILE"),
        (["--plan", "p.plan", "--staleness", "1"], "`--staleness` needs `--mode swarm`: only the swarm overlaps gradient reduction"),
        (["--alone", "--nats", "nats://x"], "`--nats` needs `--mode swarm`: only a swarm has a journal"),
        (["--plan", "p.plan", "--listen", "127.0.0.1:1"], "`--listen` needs `--mode swarm`: only a swarm has others join"),
        (["--plan", "p.plan", "--mode", "swarm", "--standby", "h:1"], "--standby: another machine can only coordinate where"),
        (["--plan", "p.plan", "--codec", "bf16"], "--codec bf16: a plan that is there already says its own codecs"),
        (["--mode", "tables"], "tables"),
        (["--mode", "islands"], "give the devices with --cluster FILE"),
        (["--alone", "--inner-steps", "5"], "`--inner-steps` needs `--mode islands`: only sites that train by themselves exchange updates"),
        (["--mode", "islands", "--outer-momentum", "1"], "--outer-momentum: at least 0 and less than 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_script_is_run(
    options: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("raise SystemExit('it was run')")
    assert run(["run", "train.py", "--out", "out", *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not Path("out").exists()


def test_alone_leaves_a_run_like_the_others_and_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "train.py", "--mode", "alone", "--cluster", "here.toml", "--out", "out"]) == 0
    settings, plan = (json.loads(Path("out", name).read_text()) for name in ("run.json", "plan.json"))
    assert (settings["mode"], settings["options"], plan["mode"]) == ("alone", {}, "alone")
    capsys.readouterr()
    assert run(["report", "out", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["mode"], told["state"], told["steps"], told["link_bytes"], told["missing"]) == ("alone", "done", 2, {}, [])
    assert told["step_seconds"]["predicted"] > 0
    assert run(["run", "train.py", "--alone", "--out", "out"]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert run(["run", "train.py", "--resume", "out"]) == 0  # there is nothing left to do
    assert json.loads(Path("out", "run.json").read_text())["mode"] == "alone"


def test_a_run_of_the_script_itself_goes_on_where_devices_are_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_job("train.py").run(out="out", progress=False)
    assert not Path("out", "plan.json").exists()
    assert run(["run", "train.py", "--resume", "out", "--mode", "lockstep"]) == 2
    assert "give the devices with --cluster FILE" in capsys.readouterr().err
    assert run(["run", "train.py", "--resume", "out", "--cluster", "here.toml"]) == 0
    assert json.loads(Path("out", "plan.json").read_text())["mode"] == "alone"


def test_a_resumed_run_keeps_the_options_it_does_not_say_anew() -> None:
    rules = mode_rules("swarm")
    before = RunSettings(script="x.py", mode="swarm", options={"nats": "nats://x", "listen": "h:1", "staleness": 1})
    kept = chosen_options(rules, {"listen": "h:2"}, before)
    assert kept == SwarmOptions(nats="nats://x", listen="h:2")  # staleness is the plan's: of the one it had, or of another that is given
    assert chosen_options(rules, {}, msgspec.structs.replace(before, mode="alone")) == SwarmOptions()
    with pytest.raises(JobError, match=r"run\.json: options of mode swarm"):
        chosen_options(rules, {}, msgspec.structs.replace(before, options={"nats": 3}))


def test_what_an_option_says_goes_before_what_the_plan_has() -> None:
    synchronous = msgspec.structs.replace(PLAN, staleness=0)
    for options, before, staleness in (
        (SwarmOptions(staleness=0), None, 0),
        (SwarmOptions(), None, 1),
        (SwarmOptions(), synchronous, 0),  # planned anew, a run trains as it did
        (SwarmOptions(staleness=1), synchronous, 1),
    ):
        plan, settled = apply_to_plan(PLAN, options, before)
        assert (plan.staleness, settled) == (staleness, SwarmOptions(staleness=staleness))
