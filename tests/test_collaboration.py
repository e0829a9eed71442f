"""Parts that learn from one another in one process, against loops written by hand; and what does not fit together is refused."""

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import atoll
from atoll.collaboration import Collaboration
from atoll.errors import JobError, JobFailedError
from atoll.events import Evaluated, StepFinished

TOLERANCE = 1e-6
STEPS, BATCH, WORDS, WIDTH = 6, 8, 40, 16
ADAM = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Sentences:
    """Rows of words, of which each follows from the one before."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(9) * (index % 5 + 1) + index) % WORDS


class Words(nn.Module):
    """Logits of the next word."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(WORDS, width), nn.Dropout(dropout), nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.dropout(self.embedding(words)).tanh())  # type: ignore[no-any-return]


def cross_entropy(logits: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def distil(model: nn.Module, batch: Tensor, received: dict[str, Tensor | None]) -> Tensor:
    logits, taught = model(batch), received["logits"]
    loss = cross_entropy(logits, batch)
    if taught is None:
        return loss
    return loss + functional.kl_div(logits.log_softmax(-1), taught.log_softmax(-1), log_target=True, reduction="batchmean")


def own_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch), batch)


def run(job: Collaboration) -> tuple[list[StepFinished], nn.Module]:
    events: list[Any] = []
    result = dataclasses.replace(job, callbacks=[events.append]).run(progress=False)
    assert result.model is not None
    return [event for event in events if isinstance(event, StepFinished)], result.model


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for (name, value), other in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.allclose(value, other, rtol=TOLERANCE, atol=TOLERANCE), name


def distillation(codec: str = "none", shared: dict[str, Any] | None = None, **changes: Any) -> Collaboration:
    torch.manual_seed(3)
    teacher = Words(2 * WIDTH, dropout=0.5)  # which frozen parts do not draw
    return atoll.collaborate(
        teacher=atoll.Part(model=teacher, trains=False, sends={"logits": codec}),
        student=atoll.Part(model=Words, loss=distil, optimizer=ADAM, max_grad_norm=0.5, receives=["logits"], **changes),
        data=Sentences(),
        batch_size=BATCH,
        steps=STEPS,
        seed=5,
        **(shared or {}),
    )


def test_a_student_learns_from_a_frozen_teacher_as_in_a_loop_written_by_hand() -> None:
    job = distillation()
    student = copy.deepcopy(job.part_jobs["student"].build_model())
    teacher = copy.deepcopy(job.parts["teacher"].model)
    assert isinstance(teacher, nn.Module)
    before = copy.deepcopy(teacher.state_dict())
    teacher.eval()
    optimizer = ADAM(student.parameters())
    steps, model = run(job)
    for step in steps:
        batch = job.samples.batch(step.step - 1)
        with torch.no_grad():
            taught = teacher(batch)
        optimizer.zero_grad()
        loss = distil(student, batch, {"logits": taught})
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 0.5)
        optimizer.step()
        assert step.loss == pytest.approx(float(loss.detach()), rel=TOLERANCE)
        assert step.losses == {"student": step.loss}
    assert len(steps) == STEPS
    assert_equal(model.get_submodule("student"), student)
    for name, value in model.get_submodule("teacher").state_dict().items():
        assert torch.equal(value, before[name])


def tell_apart(model: nn.Module, batch: Tensor, received: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Which words are not the sentence's own, as a total with its weight."""
    replaced = received["sampled"] != batch
    scores = model(received["sampled"])[..., 0]
    return functional.binary_cross_entropy_with_logits(scores, replaced.float(), reduction="sum"), replaced.numel()


def sampling(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch)
    sampled = torch.multinomial(logits.detach().flatten(0, 1).softmax(-1), 1).view_as(batch)
    return cross_entropy(logits, batch), {"sampled": sampled}


def replaced_tokens() -> Collaboration:
    return atoll.collaborate(
        discriminator=atoll.Part(model=Words, loss=tell_apart, optimizer=SGD, receives=["sampled"]),
        generator=atoll.Part(model=lambda: Words(dropout=0.2), loss=sampling, optimizer=ADAM, sends=["sampled"]),
        data=Sentences(),
        batch_size=BATCH,
        steps=STEPS,
    )


def test_a_discriminator_gets_words_a_generator_sampled() -> None:
    """The generator's sampling is looked at from outside, since its random numbers are the run's own."""
    crossing: list[Tensor] = []

    def watched(model: nn.Module, batch: Tensor, received: dict[str, Tensor]) -> tuple[Tensor, int]:
        crossing.append(received["sampled"].clone())
        return tell_apart(model, batch, received)

    job = replaced_tokens()
    parts = {**job.parts, "discriminator": dataclasses.replace(job.parts["discriminator"], loss=watched)}
    job = dataclasses.replace(job, parts=parts)
    discriminator = job.part_jobs["discriminator"].build_model()
    optimizer = SGD(discriminator.parameters())
    steps, model = run(job)
    for step, sampled in zip(steps, crossing, strict=True):
        batch = job.samples.batch(step.step - 1)
        assert sampled.dtype == torch.int64
        assert bool((sampled != batch).any())
        optimizer.zero_grad()
        total, count = tell_apart(discriminator, batch, {"sampled": sampled})
        (total / count).backward()
        optimizer.step()
        assert step.losses["discriminator"] == pytest.approx(float(total.detach()) / count, rel=TOLERANCE)
        assert step.loss == pytest.approx(sum(step.losses.values()))
    assert_equal(model.get_submodule("discriminator"), discriminator)
    again, _ = run(replaced_tokens())
    assert [step.losses for step in again] == [step.losses for step in steps]


class Points:
    """Points on a line; a sample is a point and noise."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / 64, 1.0]), torch.sin(torch.arange(4.0) * (index + 1))


def judge(model: nn.Module, batch: tuple[Tensor, Tensor], received: dict[str, Tensor]) -> Tensor:
    return functional.softplus(-model(batch[0])).mean() + functional.softplus(model(received["made"])).mean()


def fool(model: nn.Module, batch: tuple[Tensor, Tensor], received: dict[str, Tensor]) -> Tensor:
    return functional.softplus(-model(received["made"])).mean()


def gan(codec: str = "none") -> Collaboration:
    return atoll.collaborate(
        generator=atoll.Part(model=lambda: nn.Linear(4, 2), forward=lambda model, batch: model(batch[1]), sends={"made": codec}),
        discriminator=atoll.Part(
            model=lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)),
            loss=judge,
            optimizer=SGD,
            receives={"made": atoll.Receive(gradient=fool)},
        ),
        optimizer=ADAM,
        data=Points(),
        batch_size=BATCH,
        steps=STEPS,
    )


def test_gradients_of_a_gan_cross_back() -> None:
    job = gan()
    generator, discriminator = (job.part_jobs[name].build_model() for name in ("generator", "discriminator"))
    optimizers = ADAM(generator.parameters()), SGD(discriminator.parameters())
    steps, model = run(job)
    for step in steps:
        batch = job.samples.batch(step.step - 1)
        made = generator(batch[1])
        for optimizer in optimizers:
            optimizer.zero_grad()
        fooled = fool(discriminator, batch, {"made": made})
        fooled.backward()  # reaches the discriminator too, which does not use it
        optimizers[1].zero_grad()
        judged = judge(discriminator, batch, {"made": made.detach()})
        judged.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert step.losses == pytest.approx({"generator": float(fooled.detach()), "discriminator": float(judged.detach())}, rel=TOLERANCE)
    assert_equal(model.get_submodule("generator"), generator)
    assert_equal(model.get_submodule("discriminator"), discriminator)


def split(codec: str = "none") -> Collaboration:
    """One network in two parts and a third that reads the same features: gradients of both readers train the first."""

    def guess(model: nn.Module, batch: Any, received: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(model(received["features"]), batch[0])

    reader = partial(atoll.Part, model=lambda: nn.Linear(64, 2), loss=guess, receives={"features": atoll.Receive(gradient=True)})
    return atoll.collaborate(
        encoder=atoll.Part(
            model=lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh()),
            forward=lambda model, batch: model(batch[1]),
            sends={"features": codec},
        ),
        first=reader(),
        second=reader(),
        optimizer=SGD,
        data=Points(),
        batch_size=BATCH,
        steps=STEPS,
    )


def test_two_readers_train_one_encoder() -> None:
    job = split()
    encoder, first, second = (job.part_jobs[name].build_model() for name in ("encoder", "first", "second"))
    assert not torch.equal(next(first.parameters()), next(second.parameters()))
    optimizer = SGD([*encoder.parameters(), *first.parameters(), *second.parameters()])
    steps, model = run(job)
    for step in steps:
        batch = job.samples.batch(step.step - 1)
        features = encoder(batch[1])
        losses = [functional.mse_loss(reader(features), batch[0]) for reader in (first, second)]
        optimizer.zero_grad()
        sum(losses, torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert step.losses == pytest.approx({"first": float(losses[0].detach()), "second": float(losses[1].detach())}, rel=TOLERANCE)
    for name, expected in (("encoder", encoder), ("first", first), ("second", second)):
        assert_equal(model.get_submodule(name), expected)


def test_codecs_change_what_arrives_and_gradients_too() -> None:
    exact, narrow = (run(split(codec))[0][-1].loss for codec in ("none", "bf16"))
    assert narrow != exact
    assert narrow == pytest.approx(exact, rel=0.02)
    losses = {codec: run(distillation(codec))[0][-1].loss for codec in ("none", atoll.top_k(16))}
    assert losses["none"] != losses["top-logits:16"]
    assert losses["none"] == pytest.approx(losses["top-logits:16"], rel=0.05)


def test_it_is_saved_and_goes_on_and_is_evaluated(tmp_path: Path) -> None:
    evaluated = {"eval_data": [Sentences()[index] for index in range(11)], "eval_every": 2}
    job = distillation(shared=evaluated, eval_loss=own_loss, metrics={"twice": lambda model, batch: 2 * own_loss(model, batch)})
    whole = job.run(progress=False)
    dataclasses.replace(job, steps=3).run(out=tmp_path / "run", progress=False)
    rest = job.run(resume=tmp_path / "run", progress=False)
    assert rest.losses == whole.losses
    assert rest.model is not None
    assert whole.model is not None
    assert_equal(rest.model, whole.model)
    assert_equal(job.load_model(tmp_path / "run"), whole.model)
    assert [one.step for one in whole.evaluations] == [2, 4, 6]
    last: Evaluated = whole.evaluations[-1]
    rows = torch.stack([Sentences()[index] for index in range(11)])
    expected = float(own_loss(whole.model.get_submodule("student"), rows).detach())
    assert last.loss == pytest.approx(expected, rel=1e-5)
    assert last.metrics == {"student.twice": pytest.approx(2 * expected, rel=1e-5)}


TEACHER = atoll.Part(model=Words, trains=False, sends=["logits"])
STUDENT = atoll.Part(model=Words, loss=distil, receives=["logits"])
LOSS = atoll.Part(model=Words, loss=own_loss)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"teacher": TEACHER}, "collaborate: parts: give at least two"),
        ({"teacher": TEACHER, "data": TEACHER}, "collaborate: data: a part cannot be called that"),
        (
            {"teacher": TEACHER, "student": dataclasses.replace(STUDENT, receives=["logit"])},
            "no part sends 'logit'; did you mean 'logits'?",
        ),
        ({"teacher": TEACHER, "other": TEACHER, "student": STUDENT}, "other: it sends 'logits', and so does teacher"),
        ({"teacher": TEACHER, "student": LOSS}, "teacher: it sends 'logits', which no part receives"),
        (
            {"teacher": dataclasses.replace(TEACHER, sends={"logits": "zip"}), "student": STUDENT},
            "'logits': 'zip' is not how anything is sent",
        ),
        ({"teacher": TEACHER, "student": dataclasses.replace(STUDENT, loss=own_loss)}, "must be a function loss(model, batch, received)"),
        ({"teacher": TEACHER, "student": dataclasses.replace(STUDENT, loss=None)}, "student: nothing trains it"),
        ({"teacher": dataclasses.replace(TEACHER, loss=own_loss), "student": STUDENT}, "teacher: loss: it does not train"),
        (
            {"teacher": TEACHER, "student": dataclasses.replace(STUDENT, receives={"logits": atoll.Receive(gradient=True)})},
            "a gradient trains its sender, and teacher does not train",
        ),
        (
            {
                "a": atoll.Part(model=Words, loss=own_loss, sends={"x": atoll.top_k(4)}),
                "b": atoll.Part(model=Words, loss=distil, receives={"x": atoll.Receive(gradient=True)}),
            },
            "so no gradient can go back",
        ),
        (
            {
                "a": atoll.Part(model=Words, loss=own_loss, sends=["x"]),
                "b": atoll.Part(model=Words, loss=distil, receives={"x": atoll.Receive(optional=True)}),
            },
            "and a trains: both go back together",
        ),
        (
            {
                "a": atoll.Part(model=Words, loss=distil, sends=["x"], receives=["y"]),
                "b": atoll.Part(model=Words, loss=distil, sends=["y"], receives=["x"]),
            },
            "each waits in every step for what the one before it sends",
        ),
        ({"teacher": TEACHER, "student": STUDENT, "optimizer": None}, "student: it has no optimizer"),
        (
            {"teacher": TEACHER, "student": STUDENT, "batchsize": 3},
            "batchsize: is no argument of a collaboration; did you mean batch_size?",
        ),
        ({"teacher": TEACHER, "student": STUDENT, "eval_data": Sentences()}, "eval_data: no part says what to evaluate"),
        ({"teacher": TEACHER, "student": dataclasses.replace(STUDENT, eval_loss=own_loss)}, "student: eval_loss: needs eval_data"),
        ({"teacher": TEACHER, "student": dataclasses.replace(STUDENT, max_grad_norm=-1)}, "collaborate: student: max_grad_norm: must be a"),
        ({"teacher": TEACHER, "student": STUDENT, "steps": None}, "Job: steps: give either steps or epochs"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as refused:
        atoll.collaborate(**{"data": Sentences(), "batch_size": 4, "steps": 2, "optimizer": SGD, **arguments})
    assert words in str(refused.value)


def test_what_a_part_returns_is_checked() -> None:
    def wrong(**changes: Any) -> str:
        job = distillation()
        parts = {**job.parts, "teacher": dataclasses.replace(job.parts["teacher"], **changes)}
        with pytest.raises(JobError) as refused:
            dataclasses.replace(job, parts=parts).run(progress=False)
        return str(refused.value)

    assert "teacher, step 1: it sends 'logits', which must be a tensor, but it returned dict with logit" in wrong(
        forward=lambda model, batch: {"logit": batch}
    )
    assert "step 1: forward of teacher failed: ZeroDivisionError" in wrong(forward=lambda model, batch: 1 / 0)
    shared = Words()
    job = distillation()
    parts = {**job.parts, "teacher": dataclasses.replace(TEACHER, model=shared), "student": dataclasses.replace(STUDENT, model=shared)}
    with pytest.raises(JobError, match="it shares a parameter with teacher"):
        dataclasses.replace(job, parts=parts).run(progress=False)
    nan = dataclasses.replace(job.parts["student"], loss=lambda model, batch, received: distil(model, batch, received) * torch.nan)
    without_number = dataclasses.replace(job, parts={**job.parts, "student": nan})
    with pytest.raises(JobFailedError, match="step 1: the loss is nan"):
        without_number.run(progress=False)
