"""What is refused changes nothing: a run that another script tried to go on with goes on as before."""

import json
from pathlib import Path

import pytest

from atoll.cli.main import run

SCRIPT = """import torch
from torch import nn
import atoll

job = atoll.Job(
    model=lambda: nn.Sequential({layers}),
    loss=lambda model, batch: model(batch).pow(2).mean(),
    data=torch.ones(16, 4),
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    batch_size=8,
    steps=2,
)
"""


def test_a_refused_resume_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.py").write_text(SCRIPT.format(layers="nn.Linear(4, 3)"))
    Path("other.py").write_text(SCRIPT.format(layers="nn.Tanh(), nn.Linear(4, 5)").replace("batch_size=8", "batch_size=4"))
    assert run(["run", "one.py", "--alone", "--out", "RUN"]) == 0
    names = [path for path in Path("RUN").iterdir() if path.suffix in (".json", ".toml")]
    before = {path: path.read_bytes() for path in names}
    assert run(["run", "other.py", "--resume", "RUN", "--alone"]) == 2
    assert {path: path.read_bytes() for path in names} == before
    capsys.readouterr()
    assert run(["report", "RUN", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mode"] == "alone"
