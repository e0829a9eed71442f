"""Three models that learn from one another in every way there is, as a script for `atoll run`; processes say who they are.

`python parts_job.py STEPS [FOLDER [VICTIM STEP]]`: at a step the learner kills the process of a part, or its own.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import atoll
from atoll.events import Note, StopTraining

WORDS, BATCH = 300, 4
ADAM = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SCHEDULE = partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5)
STEPS = int(sys.argv[1]) if sys.argv[1:] else 12
FOLDER = Path(sys.argv[2]) if sys.argv[2:] else None  # where processes say who they are
VICTIM, AT = (sys.argv[3], int(sys.argv[4])) if sys.argv[4:] else ("", 0)


class Sentences:
    """Rows of words."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(6) * (index % 5 + 1) + index) % WORDS


class Words(nn.Module):
    """Logits of the next word, and what they are made of."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(WORDS, 8), nn.Dropout(dropout), nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        features = self.dropout(self.embedding(words)).tanh()
        return self.head(features), features


def say_who(name: str) -> None:
    """This process computes that part."""
    if FOLDER is not None:
        (FOLDER / f".{name}").write_text(str(os.getpid()))
        (FOLDER / f".{name}").rename(FOLDER / name)


def build(name: str, dropout: float = 0.0) -> nn.Module:
    say_who(name)
    return Words(dropout)


def own_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch)[0][:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def twice(model: nn.Module, batch: Tensor) -> Tensor:
    return 2 * own_loss(model, batch)


def generate(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """What it says, sampled, without a gradient; its features, whose gradient comes back; and its logits, which are to fool another."""
    logits, features = model(batch)
    sampled = torch.multinomial(logits.detach().flatten(0, 1).softmax(-1), 1).view_as(batch)
    return {"sampled": sampled, "features": features, "said": logits}


def learn(model: nn.Module, batch: Tensor, received: dict[str, Tensor | None]) -> tuple[Tensor, int]:
    die_if_told()
    logits, features = model(received["sampled"])
    assert received["features"] is not None
    loss = functional.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum")
    loss = loss + functional.mse_loss(features, received["features"], reduction="sum")
    if received["logits"] is not None:
        target = received["logits"].log_softmax(-1)
        loss = loss + functional.kl_div(logits.log_softmax(-1), target, log_target=True, reduction="sum")
    elif FOLDER is not None:
        time.sleep(0.02)  # so that there are steps left when the teacher is back
    return loss, batch.numel()


def fool(model: nn.Module, batch: Tensor, received: dict[str, Tensor]) -> Tensor:
    bias: Tensor = model.head.bias  # type: ignore[assignment, union-attr]
    return functional.softplus(-(received["said"] * bias).mean())


COUNT = [0]  # steps that this process has begun


def die_if_told() -> None:
    """The process of a part is killed, once, at its step."""
    COUNT[0] += 1
    if FOLDER is not None and COUNT[0] == AT and not (FOLDER / "killed").exists():
        (FOLDER / "killed").touch()
        os.kill(int((FOLDER / VICTIM).read_text()), signal.SIGKILL)


def part(name: str, **arguments: Any) -> atoll.Part:
    return atoll.Part(model=partial(build, name, 0.1), **arguments)


def stop_when_it_is_back(event: Any) -> None:
    """The run has shown what it was to show."""
    if isinstance(event, Note) and "is there again" in event.message:
        raise StopTraining


SENDS = {"sampled": "none", "features": "none", "said": "none"}
RECEIVES = {
    "logits": atoll.Receive(optional=VICTIM == "teacher"),
    "sampled": atoll.Receive(),
    "features": atoll.Receive(gradient=True),
    "said": atoll.Receive(gradient=fool),
}
job = atoll.collaborate(
    teacher=part("teacher", forward=lambda model, batch: model(batch)[0], trains=False, sends=["logits"]),
    generator=part("generator", site="oslo", forward=generate, optimizer=ADAM, scheduler=SCHEDULE, sends=SENDS, eval_loss=own_loss),
    learner=part("learner", loss=learn, optimizer=SGD, max_grad_norm=0.5, receives=RECEIVES, eval_loss=own_loss, metrics={"twice": twice}),
    data=Sentences(),
    batch_size=BATCH,
    steps=STEPS,
    seed=3,
    eval_data=[Sentences()[index] for index in range(10)],
    eval_every=4,
    callbacks=[stop_when_it_is_back],
)
