"""The job of `islands.py`: a small language model on the standard library's text, evaluated every so many steps.

islands_job.py STEPS BATCH LEARNING_RATE SEED EVALUATE_EVERY
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import atoll
from atoll.data import StandardLibraryText
from atoll.script import load_script

EXAMPLE = Path(__file__).parents[1] / "examples" / "language_model.py"
given = sys.argv[1:6] if len(sys.argv) >= 6 else ["100", "16", "2e-3", "0", "10"]
steps, batch, rate, seed, every = int(given[0]), int(given[1]), float(given[2]), int(given[3]), int(given[4])
module = sys.modules[load_script(str(EXAMPLE), ()).job.loss.__module__]


class HeldOut:
    """Some of the text that is not trained on, from all over it."""

    def __init__(self, count: int) -> None:
        self.text = StandardLibraryText(sequence_length=module.SEQUENCE, split="eval")
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.text[index * (len(self.text) // self.count)]


job = atoll.Job(
    model=partial(module.LanguageModel, layers=5, width=192, heads=6),
    loss=module.loss,
    data=partial(StandardLibraryText, sequence_length=module.SEQUENCE),
    eval_data=HeldOut(96),
    eval_every=every,
    optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.01),
    batch_size=batch,
    steps=steps,
    seed=seed,
    name="islands benchmark",
)
