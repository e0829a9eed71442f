"""What a command prints beside its answer: notes, the script's own output, and characters a terminal may lack."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from atoll.cli.main import run
from tests.cli.test_main import COMMAND, PLAN, TINY
from tests.warm import run_warm

SCRIPT = """import argparse, ctypes, os, sys
import torch, atoll
print("from Python", *sys.argv)
if os.name == "posix":
    ctypes.CDLL(None).puts(b"from C")
os.system("echo from a child")
parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=1)
class Branch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = parser.parse_args().layers
        self.rows = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
        self.scale = torch.linspace(0, 1, 4).sum().item()
    def forward(self, x):
        if x.isnan().any():
            x = torch.zeros_like(x)
        return self.rows(x)
job = atoll.Job(model=Branch, loss=lambda model, batch: (model(batch) ** 2).mean(), data=torch.zeros(64, 8),
                optimizer=torch.optim.NAdam, batch_size=16, steps=3)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    Path("good.plan").write_text(PLAN)
    Path("train.py").write_text(SCRIPT)


def test_what_was_assumed_is_said_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "train.py", "-c", "tiny.toml", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes == [
        "the model was built with real weights, because its constructor needs values: Tensor.item() cannot be called on meta tensors",
        "train.py:16 asks a tensor for its value: False is taken for granted, as on the first samples; "
        "a run stops where that does not hold",
        "the cost model does not know NAdam; it is priced as adamw",
    ]
    assert run(["plan", "train.py", "-c", "tiny.toml"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Notes" in shown
    assert all(note in shown.replace(" · ", " ") for note in notes)
    assert run(["plan", "bert-large", "-c", "tiny.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


@pytest.mark.parametrize(("arguments", "layers", "seen"), [((), 1, "train.py"), (("--", "--layers", "4"), 4, "train.py --layers 4")])
def test_a_script_gets_its_own_arguments_and_stdout_is_json_whoever_prints(arguments: tuple[str, ...], layers: int, seen: str) -> None:
    command = [*COMMAND, "plan", "train.py", "-c", "tiny.toml", "--json", *arguments]
    ended = run_warm(command)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["graph"]["parameters"] == 72 * layers
    for who in (f"from Python {seen}\n", "from C\n", "from a child\n"):
        assert who in ended.stderr


@pytest.mark.parametrize("command", ["presets -- x", "plan bert-large -c tiny.toml -- --layers 4"])
def test_arguments_nobody_takes_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command.split()) == 2
    assert "what follows `--`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--batch-size 16", "--batch-size 16: good.plan is a plan of a batch of 8; leave it out, or plan anew"),
        ("--mode swarm", "--mode: has no meaning with --check"),
        ("--codec=auto", "--codec: has no meaning with --check"),
        ("--why", "--why: has no meaning with --check"),
        ("-o new.json", "--output: has no meaning with --check"),
    ],
)
def test_what_check_cannot_honour_is_refused(options: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"plan bert-large -c tiny.toml --check good.plan {options}".split()) == 2
    assert complaint in capsys.readouterr().err


def test_the_plans_own_batch_may_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "bert-large", "-c", "tiny.toml", "--check", "good.plan", "--batch-size", "8"]) == 0


@pytest.mark.parametrize("setting", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}])
def test_a_terminal_without_unicode_gets_plain_characters(setting: dict[str, str]) -> None:
    command = [*COMMAND, "plan", "bert-large", "-c", "tiny.toml", "--check", "good.plan"]
    ended = subprocess.run(command, capture_output=True, timeout=120, check=True, env={**os.environ, **setting})
    text = ended.stdout.decode("latin-1")
    assert "?" not in text
    assert "%  ####" in text
    assert "2 x A100-80GB" in text or "latin-1" in setting.values()


@pytest.mark.parametrize("setting", [{"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}, {"PYTHONIOENCODING": "ascii"}])
def test_json_means_the_same_in_every_encoding(setting: dict[str, str]) -> None:
    Path("tiny.toml").write_text(TINY.replace('name = "tiny"', 'name = "små → øyer"'), encoding="utf-8")
    Path("good.plan").write_text(PLAN.replace("cluster=tiny", 'cluster="små → øyer"'), encoding="utf-8")
    command = [*COMMAND, "plan", "bert-large", "-c", "tiny.toml", "--check", "good.plan", "--json"]
    ended = subprocess.run(command, capture_output=True, timeout=120, check=True, env={**os.environ, **setting})
    assert json.loads(ended.stdout)["cluster"]["name"] == "små → øyer"


@pytest.mark.parametrize(("columns", "widest"), [("140", 140), ("70", 70), (None, 100), ("wide", 100)])
def test_piped_output_is_as_wide_as_columns_says(
    columns: str | None, widest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert run(["presets"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) == pytest.approx(widest, abs=12)
