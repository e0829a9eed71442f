"""`atoll export`: where weights are written, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from atoll.cli.main import run
from atoll.events import EventLog
from atoll.runtime.checkpoint.checkpointer import Checkpointer
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.checkpoint.manifest import RunIdentity
from atoll.runtime.stage.shard_spec import ShardSpec


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run's directory with checkpoints of steps 2 and 4, of a model that came with a configuration."""
    torch.manual_seed(0)
    identity = RunIdentity(job="t", optimizer="SGD", seed=0, batch_size=1, model_config={"model_type": "tiny"})
    model = nn.Linear(3, 2)
    held = [LocalShard(ShardSpec(name=name, shape=tuple(value.shape)), value) for name, value in model.state_dict().items()]
    with Checkpointer(tmp_path / "RUN" / "checkpoints", None, identity=identity, keep_last=2) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, held, optimizers=[], extra={}, final=True)
    return tmp_path / "RUN"


def test_a_folder_gets_the_configuration_and_a_file_does_not(saved: Path, tmp_path: Path) -> None:
    assert run(["export", str(saved), "--to", str(tmp_path / "one" / "model.safetensors")]) == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert run(["export", str(saved), "--to", str(tmp_path / "folder"), "--step", "2"]) == 0
    assert json.loads((tmp_path / "folder" / "config.json").read_text()) == {"model_type": "tiny"}
    assert (tmp_path / "folder" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nowhere", "--to", "x.safetensors"], "there is no such directory"),
        (["{run}", "--to", "{tmp}/model.pt"], "give a file whose name ends in .safetensors, or a directory"),
        (["{run}", "--to", "{run}/latest", "--step", "3"], "no checkpoint of step 3; it has 2, 4"),
        (["{tmp}/empty", "--to", "{tmp}/x.safetensors"], "no checkpoint there"),
        (["{tmp}/alone", "--to", "{tmp}/x.safetensors"], "this run has no checkpoint to export; a run saves at its end"),
    ],
)
def test_what_cannot_be_exported_is_said(
    saved: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with EventLog(tmp_path / "alone"):
        pass
    assert run(["export", *(argument.format(tmp=tmp_path, run=saved) for argument in arguments)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_weights_that_are_there_are_replaced_only_when_asked(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to, folder = tmp_path / "model.safetensors", tmp_path / "folder"
    folder.mkdir()
    for path in (to, folder / "model-00001-of-00002.safetensors", folder / "model.safetensors.index.json"):
        path.write_text("somebody's")
    for where in (to, folder):
        assert run(["export", str(saved), "--to", str(where)]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "is there already; give another name, or --overwrite to replace it" in told
        assert all(path.read_text() == "somebody's" for path in ([to] if where is to else folder.iterdir()))
        assert run(["export", str(saved), "--to", str(where), "--overwrite"]) == 0
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json"}, "parts of other weights are gone"
    assert load_file(to).keys() == load_file(folder / "model.safetensors").keys() == {"weight", "bias"}
