"""A student learns to translate from sentences, and from a teacher at another site that knows how likely every word is.

    python examples/distilled_translation.py                                          both here
    atoll run examples/distilled_translation.py --cluster examples/clusters/two_sites.toml

Of the teacher's 4,096 logits for every word the 16 largest cross, in 43 bytes. While the teacher is away the student learns from the
sentences alone.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

import atoll

WORDS, LENGTH, SYNONYMS = 4096, 12, 8


def dictionary() -> tuple[Tensor, Tensor]:
    """Of every word its translations, and how likely each is."""
    generator = torch.Generator().manual_seed(1)
    translations = torch.randint(WORDS, (WORDS, SYNONYMS), generator=generator)
    return translations, torch.rand(WORDS, SYNONYMS, generator=generator).softmax(-1)


class Sentences:
    """A sentence and a translation: the words in reverse order, each by one of its synonyms."""

    def __init__(self, length: int = 4096) -> None:
        self.length, (self.translations, self.likely) = length, dictionary()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        source = (torch.rand(LENGTH) ** 3 * WORDS).long()  # some words are more frequent than others
        chosen = torch.multinomial(self.likely[source], 1)
        return source, self.translations[source].gather(1, chosen).squeeze(1).flip(0)


class Teacher(nn.Module):
    """It has the dictionary."""

    def __init__(self) -> None:
        super().__init__()
        translations, likely = dictionary()
        self.table = nn.Parameter(torch.full((WORDS, WORDS), math.log(1e-6)))
        with torch.no_grad():
            self.table.scatter_(1, translations, likely.log())

    def forward(self, source: Tensor) -> Tensor:
        return self.table[source.flip(1)]


class Student(nn.Module):
    """It has to find out about words and their order."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.order, self.head = nn.Embedding(WORDS, width), nn.Linear(LENGTH, LENGTH), nn.Linear(width, WORDS)

    def forward(self, source: Tensor) -> Tensor:
        words = self.embedding(source)  # sentences × places × width
        return self.head(self.order(words.transpose(1, 2)).transpose(1, 2))  # type: ignore[no-any-return]


def translate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    source, target = batch
    return cross_entropy(model(source).flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def distil(model: nn.Module, batch: tuple[Tensor, Tensor], received: dict[str, Tensor | None]) -> tuple[Tensor, int]:
    if (taught := received["logits"]) is None:
        return translate(model, batch)
    source, target = batch
    logits = model(source)
    both = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") - (taught.softmax(-1) * log_softmax(logits, -1)).sum()
    return both / 2, target.numel()


job = atoll.collaborate(
    name="translation",
    teacher=atoll.Part(
        model=Teacher, trains=False, forward=lambda model, batch: model(batch[0]), sends={"logits": atoll.top_k(16)}, site="oslo"
    ),
    student=atoll.Part(model=Student, loss=distil, receives={"logits": atoll.Receive(optional=True)}, site="rome", eval_loss=translate),
    optimizer=partial(torch.optim.AdamW, lr=0.01),
    data=Sentences(),
    batch_size=64,
    steps=300,
    eval_data=[Sentences()[index] for index in range(256)],
    eval_every=100,
)

if __name__ == "__main__":
    job.run()
