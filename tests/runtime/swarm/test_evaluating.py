"""A swarm's states are evaluated as one process would evaluate the same weights."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.errors import JobFailedError
from atoll.runtime.alone import evaluate
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.swarm.evaluating import evaluate_state, evaluates_after
from atoll.runtime.swarm.files import CheckpointFiles, Key
from atoll.runtime.swarm.packing import pack
from atoll.runtime.swarm.spec import stored_every

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
    keys = [Key(0, 4, 0), Key(0, 4, 1)]

    async def store() -> None:
        for key, held in zip(keys, (first, last), strict=True):
            await CheckpointFiles(tmp_path / "swarm").write(key, pack({"parameters": held, "buffers": {}, "optimizer": None}))

    with pytest.raises(JobFailedError, match="after step 4 are not there"):
        evaluate_state(RunDirectory(tmp_path), it, keys)
    asyncio.run(store())
    found = evaluate_state(RunDirectory(tmp_path), it, keys)
    expected = evaluate(it, model, torch.device("cpu"), 4, Data())
    assert (found.step, found.samples) == (4, 64)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)


def test_states_are_stored_after_every_step_that_is_evaluated() -> None:
    plain, often, last = job(), job(eval_data=Data(), eval_every=4), job(eval_data=Data())
    assert [stored_every(None, it) for it in (plain, often, last)] == [0, 4, 0]
    assert [stored_every(6, it) for it in (plain, often, last)] == [6, 2, 6]
    assert [step for step in range(1, 11) if evaluates_after(often, step, 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if evaluates_after(last, step, 10)] == [10]
    assert not evaluates_after(plain, 10, 10)
