"""Examples are documentation that runs: each loads, takes a few steps, learns something, and stays short."""

import sys
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

from atoll.collaboration import Collaboration
from atoll.data.stream import is_stream
from atoll.script import load_job

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def unchanged_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(path)])  # examples may read files that are named there
    job = load_job(path)
    changes: dict[str, object] = {"micro_batch_size": 2}
    if isinstance(job, Collaboration):  # parts take whole batches
        changes = {"parts": {name: replace(part, eval_loss=None, metrics={}) for name, part in job.parts.items()}}
    short = replace(job, steps=8, batch_size=4, eval_data=None, eval_every=None, eval_loss=None, metrics={}, scheduler=None, **changes)
    short = replace(short, data=list(islice(job.dataset, 4)) if is_stream(job.dataset) else [job.dataset[i] for i in range(4)])
    losses = replace(short, sampler=None, num_workers=0).run(progress=False, device="cpu").losses
    assert losses[-1] < losses[0] or len(job.turns) > 1  # on four samples, over and over; players of a game need not


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert f"python examples/{path.name}" in text
    last = text.rstrip().splitlines()[-2:]
    assert last[0] == 'if __name__ == "__main__":'
    assert last[1] in ("    job.run()", "    main()", "    trainer.train()")


def test_the_language_models_schedule_fits_its_steps() -> None:
    job = load_job(next(path for path in EXAMPLES if path.stem == "language_model"))
    assert job.scheduler is not None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = job.scheduler(optimizer)
    for _ in range(job.total_steps):
        optimizer.step()
        scheduler.step()  # one step too many would raise
    assert isinstance(job.scheduler, partial)
