"""Several losses with their own optimizers in one job: a loop written by hand, alone, with two ranks, and stopped in between."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from atoll.errors import DividedLossError, JobError
from atoll.events import Evaluated, StepFinished, read_events
from atoll.graph.eager import Uncaptured, capture_or_run
from atoll.script import load_job
from tests.runtime.modes.lockstep.test_eager import in_two_processes, parse_plan

pytestmark = pytest.mark.timeout(200)

STEPS, BATCH, TOLERANCE = 9, 8, 1e-5
EXAMPLE = load_job(Path(__file__).parents[1] / "examples" / "gan.py")
GENERATOR = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
DISCRIMINATOR = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SCHEDULE = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)
JOB = dataclasses.replace(
    EXAMPLE,
    optimizer={"discriminator": DISCRIMINATOR, "generator": GENERATOR},
    scheduler={"generator": SCHEDULE},
    max_grad_norm=0.5,
    batch_size=BATCH,
    steps=STEPS,
    eval_every=None,
)


def plain(batches: Sequence[Any]) -> tuple[list[dict[str, float]], nn.Module]:
    """As one would write it: all gradients are computed, each optimizer uses its own."""
    model: Any = JOB.build_model("cpu")
    discriminator, generator = DISCRIMINATOR(model.discriminator.parameters()), GENERATOR(model.generator.parameters())
    schedule, found = SCHEDULE(generator), []
    for batch in batches:
        losses = {}
        for name, optimizer in (("discriminator", discriminator), ("generator", generator)):
            model.zero_grad()
            loss = JOB.loss[name](model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(getattr(model, name).parameters(), 0.5)
            optimizer.step()
            losses[name] = float(loss.detach())
        schedule.step()
        found.append(losses)
    return found, model


def test_a_gan_goes_from_one_process_to_two_and_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    plan = parse_plan(f"plan v1 graph=gan cluster=c batch={BATCH} micro_batch=2\nstage 0: layers 0-0: a=3 b=5\n")
    dataclasses.replace(JOB, steps=3).run(out=run, progress=False)
    in_two_processes(tmp_path, {"run": (dataclasses.replace(JOB, steps=6), plan)})
    result = JOB.run(resume=run, progress=False)
    losses, model = plain([JOB.samples.batch(step) for step in range(STEPS)])
    events = list(read_events(run / "events.jsonl"))
    steps = [event for event in events if isinstance(event, StepFinished)]
    assert [event.step for event in steps] == list(range(1, STEPS + 1))
    for event, expected in zip(steps, losses, strict=True):
        assert event.losses == pytest.approx(expected, rel=TOLERANCE)
        assert event.loss == pytest.approx(sum(expected.values()), rel=TOLERANCE)
    assert result.model is not None
    for name, value in model.named_parameters():
        assert torch.allclose(result.model.get_parameter(name), value, rtol=TOLERANCE, atol=TOLERANCE), name
    assert [event.step for event in events if isinstance(event, Evaluated)] == [3, 6, 9]


class Stream(IterableDataset[Any]):
    """Samples that come once, in their order."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def test_all_turns_of_a_step_have_the_same_micro_batches() -> None:
    torch.manual_seed(0)
    samples = [(torch.randn(2), torch.randn(8)) for _ in range(STEPS * BATCH)]
    changes: dict[str, Any] = {"data": Stream(samples), "micro_batch_size": 3, "eval_data": None, "eval_loss": None}
    events: list[Any] = []
    result = dataclasses.replace(JOB, callbacks=[events.append], **changes).run(progress=False)
    losses, model = plain([default_collate(samples[first : first + BATCH]) for first in range(0, len(samples), BATCH)])
    for event, expected in zip([event for event in events if isinstance(event, StepFinished)], losses, strict=True):
        assert event.losses == pytest.approx(expected, rel=TOLERANCE)
    assert result.model is not None
    for name, value in model.named_parameters():
        assert torch.allclose(result.model.get_parameter(name), value, rtol=TOLERANCE, atol=TOLERANCE), name


def test_micro_batches_whose_losses_do_not_add_up_are_refused() -> None:
    def largest(model: Any, batch: Any) -> Tensor:
        return cast(Tensor, model.discriminator(model.generator(batch[1])).max())

    job = dataclasses.replace(JOB, loss={**JOB.loss, "generator": largest}, micro_batch_size=4, eval_data=None, eval_loss=None)
    with pytest.raises(DividedLossError):
        job.run(progress=False)


def test_it_is_planned_as_one_layer() -> None:
    uncaptured = capture_or_run(JOB, most_bytes=2.0**33)
    assert isinstance(uncaptured, Uncaptured)
    assert "it has several losses, with an optimizer each (discriminator, generator)" in uncaptured.notes[0]
    assert uncaptured.graph.parameters == sum(parameter.numel() for parameter in JOB.build_model("cpu").parameters())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": GENERATOR}, "Job: optimizer: give one for each loss, by the same names (discriminator, generator), got one"),
        ({"loss": JOB.loss["generator"], "scheduler": None}, "Job: optimizer: several need as many losses"),
        ({"precision": "fp16"}, "take bf16"),
        ({"eval_loss": None}, "Job: eval_loss: there are several losses: say which to evaluate"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as refused:
        dataclasses.replace(JOB, **changes)
    assert words in str(refused.value)


def test_every_parameter_has_one_optimizer() -> None:
    class Third(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.discriminator, self.encoder = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    with pytest.raises(JobError, match=r"none trains the parameter 'encoder\.weight'"):
        JOB.trained_in(Third())
    shared = Third()
    shared.encoder, shared.generator = nn.Identity(), shared.discriminator  # type: ignore[assignment]
    with pytest.raises(JobError, match="every parameter has one optimizer"):
        JOB.trained_in(shared)
    with pytest.raises(JobError, match="the model has no submodule of this name; it has 0"):
        JOB.trained_in(nn.Sequential(nn.Linear(2, 2)))
