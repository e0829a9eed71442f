"""Replaced-token detection: a small generator fills gaps in sentences, and a discriminator at another site finds out which words it chose.

    python examples/replaced_tokens.py                                          both here
    atoll run examples/replaced_tokens.py --cluster examples/clusters/two_sites.toml

Both sites have the text. Only the words that were sampled for gaps cross, two bytes each: the discriminator knows where gaps are.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import atoll

LANGUAGES, EACH, LENGTH, GAPS = 3, 200, 32, 0.15
WORDS = LANGUAGES * EACH + 1
GAP = WORDS - 1
Sentence = tuple[Tensor, Tensor, Tensor]


class Text:
    """Sentences in three languages with one grammar; a sample is the words, where gaps are, and any other words."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Sentence:
        language, words = index % LANGUAGES, [int(torch.randint(EACH, ()))]
        for step in torch.randint(1, 4, (LENGTH - 1,)).tolist():  # a word is followed by one of three
            words.append((words[-1] * 3 + step) % EACH)
        other = torch.randint(EACH, (LENGTH,))
        return language * EACH + torch.tensor(words), torch.rand(LENGTH) < GAPS, language * EACH + other


class Encoder(nn.Module):
    """Something about every word, from all words of its sentence."""

    def __init__(self, width: int, outputs: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words) + self.places))  # type: ignore[no-any-return]


def fill(model: nn.Module, batch: Sentence) -> tuple[tuple[Tensor, int], dict[str, Tensor]]:
    """Guess the words in the gaps; what is sampled crosses."""
    words, gaps, _ = batch
    logits = model(words.masked_fill(gaps, GAP))[gaps]  # one row a gap
    sampled = torch.multinomial(logits.detach().softmax(-1), 1).squeeze(1).to(torch.int16)
    return (cross_entropy(logits, words[gaps], reduction="sum"), max(1, len(sampled))), {"sampled": sampled}


def told_apart(model: nn.Module, words: Tensor, shown: Tensor) -> tuple[Tensor, int]:
    scores = model(shown)[..., 0]
    return binary_cross_entropy_with_logits(scores, (shown != words).float(), reduction="sum"), words.numel()


def detect(model: nn.Module, batch: Sentence, received: dict[str, Tensor]) -> tuple[Tensor, int]:
    words, gaps, _ = batch
    return told_apart(model, words, words.masked_scatter(gaps, received["sampled"].long()))


def detect_others(model: nn.Module, batch: Sentence) -> tuple[Tensor, int]:
    """For evaluation: any words of the language in the gaps."""
    words, gaps, others = batch
    return told_apart(model, words, torch.where(gaps, others, words))


job = atoll.collaborate(
    name="replaced tokens",
    generator=atoll.Part(model=partial(Encoder, 32, WORDS, 1), loss=fill, sends=["sampled"], site="oslo"),
    discriminator=atoll.Part(
        model=partial(Encoder, 96, 1, 2), loss=detect, receives=["sampled"], max_grad_norm=1.0, site="rome", eval_loss=detect_others
    ),
    optimizer=partial(torch.optim.AdamW, lr=2e-3),
    data=Text(),
    batch_size=32,
    steps=300,
    eval_data=[Text()[index] for index in range(128)],
    eval_every=100,
)

if __name__ == "__main__":
    job.run()
