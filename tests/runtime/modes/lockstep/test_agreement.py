"""Ranks that do not train the same job are told apart before the first step."""

import sys
import types
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import atoll
from atoll.errors import AtollError, CaptureError, JobError
from atoll.graph.capture import Captured, capture_program
from atoll.runtime.modes.lockstep.agreement import Said, agree_on_evaluated, difference, digest_of_code, digest_of_weights
from tests.process_group import fork_ranks, process_group

SAID = Said(
    steps=10,
    batch_size=8,
    seed=0,
    samples=64,
    order="1, 2",
    precision="fp32",
    max_grad_norm=None,
    eval_every=None,
    optimizer="AdamW{'lr': 0.001}",
    weights="abc",
    callbacks=False,
)


def test_equal_jobs_agree() -> None:
    assert difference([SAID, SAID, SAID]) is None


def test_callbacks_may_be_on_some_ranks_only() -> None:
    assert difference([msgspec.structs.replace(SAID, callbacks=True), SAID]) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 12),
        ("seed", 1),
        ("samples", 63),
        ("precision", "bf16"),
        ("max_grad_norm", 1.0),
        ("optimizer", "SGD{}"),
        ("weights", "abd"),
        ("code", "abe"),
    ],
)
def test_what_differs_is_named_with_its_rank(field: str, value: object) -> None:
    sentence = difference([SAID, SAID, msgspec.structs.replace(SAID, **{field: value})])
    assert sentence is not None
    assert "rank 2" in sentence or "and 2" in sentence


def test_the_digest_sees_one_changed_number_of_a_small_tensor_and_any_other_draw() -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(300, 300))

    first, again, other = model(0), model(0), model(1)
    assert digest_of_weights(first) == digest_of_weights(again)
    assert digest_of_weights(first) != digest_of_weights(other)
    with torch.no_grad():
        again.get_parameter("0.weight")[3, 3] += 1e-3
    assert digest_of_weights(first) != digest_of_weights(again)


def job_with(chance: float) -> atoll.Job:
    return atoll.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(chance), nn.Linear(4, 1)),
        loss=lambda model, batch: model(batch).mean(),
        data=list(torch.zeros(8, 4)),
        optimizer=torch.optim.SGD,
        batch_size=4,
        steps=1,
    )


def compare(rank: int, store: Path, programs: Sequence[Captured | AtollError]) -> None:
    with process_group(store, rank, len(programs)):
        try:
            agree_on_evaluated({"": programs[rank]})
        except JobError as error:
            sys.exit("they differ in the captured programs of what is evaluated" in str(error))


def test_programs_that_differ_in_a_number_are_told_apart_and_so_is_one_that_is_missing(tmp_path: Path) -> None:
    one, again, other = (capture_program(job_with(chance), divided=True) for chance in (0.1, 0.1, 0.2))
    assert one.digest() == again.digest() == capture_program(job_with(0.1), divided=True, check=True).digest()
    assert fork_ranks(2, compare, tmp_path / "same", [one, again]) == 0
    assert fork_ranks(2, compare, tmp_path / "other", [one, other]) == 1
    assert fork_ranks(2, compare, tmp_path / "none", [one, CaptureError("not there")]) == 1


def test_code_that_runs_as_it_is_written_is_compared_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, digests = job_with(0.1), []
    for text in ("one", "one", "two"):
        module = types.ModuleType("of_a_host")
        module.__file__ = str(tmp_path / "of_a_host.py")
        (tmp_path / "of_a_host.py").write_text(f"# {text}")
        monkeypatch.setitem(sys.modules, "of_a_host", module)
        model = type("Model", (nn.Module,), {"__module__": "of_a_host"})()
        digests.append(digest_of_code(model, job))
    assert digests[0] == digests[1] != digests[2]
