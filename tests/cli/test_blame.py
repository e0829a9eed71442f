"""What a user's script does wrong is told as the script's error, at its own line: never as a fault in Atoll."""

from pathlib import Path

import pytest

from atoll.cli.main import run
from tests.cli.test_main import TINY

SCRIPT = """import torch
import atoll
class Data:
    def __len__(self): return 64
    def __getitem__(self, i): ITEM
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = LAYER
    def forward(self, x):
        return self.layer(x)TAIL
def loss(model, batch):
    value = model(batch) ** 2
    return LOSS
job = atoll.Job(model=Model, loss=loss, data=DATA, optimizer=lambda p: torch.optim.OPTIMIZER, batch_size=16, steps=3)
"""
RIGHT = {
    "ITEM": "return torch.ones(8)",
    "LAYER": "torch.nn.Linear(8, 4)",
    "TAIL": "",
    "LOSS": "value.mean()",
    "DATA": "Data()",
    "OPTIMIZER": "SGD(p, lr=0.1)",
}
WRONG = [
    ("LOSS", "None", "train.py: Job: loss: it must return a tensor or (total, weight), it returned NoneType None"),
    ("LOSS", "1.5", "train.py: Job: loss: it must return a tensor or (total, weight), it returned float 1.5"),
    ("LOSS", "(value.mean(),) * 3", "train.py: Job: loss: it must return a tensor or (total, weight), it returned tuple"),
    ("LOSS", "{'loss': value.mean()}", "train.py: Job: loss: it must return a tensor or (total, weight), it returned dict"),
    ("LOSS", "value.mean(1)", "train.py: Job: loss: it must return one number, it returned shape [4]"),
    ("LOSS", "value.argmax()", "train.py: Job: loss: it must return a floating-point number, it returned torch.int64"),
    ("LOSS", "value.mean().detach()", "train.py: Job: loss: no gradient flows from it to the model"),
    ("LOSS", "batch.mean()", "train.py: Job: loss: no gradient flows from it to the model"),
    ("LOSS", "value.mean().item()", "train.py: Job: loss: it must return a tensor, it returned a plain number"),
    ("LOSS", "value.sum(), 'x'", "train.py: Job: loss: the weight in (total, weight) must be a number, it is str 'x'"),
    ("LOSS", "value.undefined()", "train.py:14: job 'job' cannot be captured: the loss"),
    ("ITEM", "raise KeyError(i)", "train.py:5: job 'job' cannot be captured: loading a batch failed: KeyError: "),
    ("ITEM", "return torch.ones(1 + i)", "loading a batch failed: RuntimeError: stack expects each tensor to be equal size"),
    ("ITEM", "raise SystemExit(3)", "train.py:5: the script exits (3)"),
    ("DATA", "{i: torch.ones(8) for i in range(7, 71)}", "loading a batch failed: KeyError: "),
    ("OPTIMIZER", "SGD(p, lr=-1)", "train.py:15: Job: optimizer: making it failed: ValueError: Invalid learning rate: -1"),
    ("OPTIMIZER", "nonsense(p)", "train.py:15: Job: optimizer: making it failed: AttributeError"),
    ("LAYER", "torch.nn.LazyLinear(4)", "train.py: job 'job' cannot be captured: the size of the lazy parameter 'layer.weight'"),
    ("LAYER", "torch.nn.Linear('a', 4)", "train.py:9: job 'job' cannot be captured: building the model failed: TypeError"),
    ("LAYER", "torch.nn.Linear(7, 4)", "train.py:11: job 'job' cannot be captured: module 'layer' (Linear): RuntimeError"),
    ("LAYER", "torch.nn.Linear(8, 4).requires_grad_(False)", "train.py: Job: model: it has no trainable parameter"),
    ("LAYER", "torch.nn.ReLU()", "train.py: Job: model: it has no trainable parameter"),
    ("TAIL", ".to('nowhere')", "train.py:11: job 'job' cannot be captured"),
]


def write_script(wrong: str = "", value: str = "") -> None:
    text = SCRIPT
    for name, right in RIGHT.items():
        text = text.replace(name, value if name == wrong else right)
    Path("train.py").write_text(text)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atoll.cli.output._PATIENCE_SECONDS", 3600.0)  # on a busy machine it would say what it is doing
    Path("tiny.toml").write_text(TINY)


@pytest.mark.parametrize(("wrong", "value", "complaint"), WRONG)
def test_the_scripts_mistake_is_its_own(wrong: str, value: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_script(wrong, value)
    assert run(["plan", "train.py", "-c", "tiny.toml"]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.err.startswith("error: train.py")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize("loss", ["value.mean()", "(value.sum(), len(batch))", "(value.sum(), torch.ones_like(value).sum())"])
def test_what_is_right_is_planned(loss: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_script("LOSS", loss)
    assert run(["plan", "train.py", "-c", "tiny.toml"]) == 0


def test_a_mistake_in_a_file_beside_the_script_is_found_there(capsys: pytest.CaptureFixture[str]) -> None:
    write_script("ITEM", "import beside_the_script; return beside_the_script.sample(i)")
    Path("beside_the_script.py").write_text("def sample(i):\n    return 1 // 0\n")
    assert run(["plan", "train.py", "-c", "tiny.toml"]) == 2
    assert "beside_the_script.py:2: job 'job' cannot be captured: loading a batch failed: ZeroDivisionError" in capsys.readouterr().err


def test_a_fault_in_the_analysis_is_still_atolls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*arguments: object) -> None:
        raise IndexError("inside")

    write_script()
    monkeypatch.setattr("atoll.graph.capture.Liveness", broken)
    assert run(["plan", "train.py", "-c", "tiny.toml"]) == 1
    assert "a fault in Atoll" in capsys.readouterr().err
