"""A swarm's states are evaluated as one process would evaluate the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.errors import JobFailedError
from atoll.runtime.checkpoint.manifest import MODEL, RunIdentity, SmallState
from atoll.runtime.checkpoint.state_file import StateFile, assemble_checkpoint
from atoll.runtime.evaluation import ModelEvaluator, evaluates_after
from atoll.runtime.modes.swarm.coordinator_process import evaluate_state
from atoll.runtime.run_directory import RunDirectory

from .test_compute import Data, job


def largest(model: nn.Module, batch: Any) -> float:
    return float(model(batch[0]).abs().max())


def test_states_of_stages_are_evaluated_as_one_model(tmp_path: Path) -> None:
    it = job(eval_data=Data(), eval_every=2, metrics={"largest": largest}, micro_batch_size=5)
    torch.manual_seed(3)
    model = it.build_model("cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    first, last = {}, {}
    for name, value in model.state_dict().items():
        (first if name.startswith("first") else last)[name] = value
    files = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for file, held in zip(files, (first, last), strict=True):
        content = StateFile({MODEL + name: value for name, value in held.items()}, SmallState(), {}).content()
        file.write_bytes(content.numpy().tobytes())
    with pytest.raises(JobFailedError, match="the checkpoint of step 4 is not there"):
        evaluate_state(RunDirectory(tmp_path), it, 4)
    identity = RunIdentity(job="test", optimizer="SGD", seed=0, batch_size=1)
    assemble_checkpoint(tmp_path / "checkpoints", dict.fromkeys(files), step=4, identity=identity, extra={}, keep_last=2)
    found = evaluate_state(RunDirectory(tmp_path), it, 4)
    expected = ModelEvaluator(it, model, torch.device("cpu"), Data()).run(4)
    assert (found.step, found.samples) == (4, 64)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)


def test_evaluations_are_due_after_every_so_many_steps_and_the_last() -> None:
    plain, often, last = job(), job(eval_data=Data(), eval_every=4), job(eval_data=Data())
    assert [step for step in range(1, 11) if evaluates_after(often, step, 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if evaluates_after(last, step, 10)] == [10]
    assert not evaluates_after(plain, 10, 10)
