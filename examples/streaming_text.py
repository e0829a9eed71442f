"""A streaming text job: a model learns the next byte of files that are read piece by piece, however large they are.

python examples/streaming_text.py              trains here, alone, in about half a minute
atoll run examples/streaming_text.py --cluster examples/clusters/laptop.toml -- texts/*.txt
"""

import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

import atoll

LENGTH = 64


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Pieces of files, one after the other; no more than a piece is held.

    With `state_dict` and `load_state_dict` a run goes on at the byte where it was: the state is part of every checkpoint.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files, self.file, self.offset = files, 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.file < len(self.files):
            with self.files[self.file].open("rb") as text:
                text.seek(self.offset)
                while len(piece := text.read(LENGTH + 1)) == LENGTH + 1:
                    self.offset += LENGTH
                    bytes_ = torch.frombuffer(bytearray(piece), dtype=torch.uint8).long()
                    yield bytes_[:-1], bytes_[1:]
                    text.seek(self.offset)
            self.file, self.offset = self.file + 1, 0
        self.file = 0  # the next epoch begins anew

    def state_dict(self) -> dict[str, Any]:
        return {"file": self.file, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.file, self.offset = state["file"], state["offset"]


class NextByte(nn.Module):
    """What came before, mixed along the line by convolutions that do not look ahead, says what comes next."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=2**i) for i in range(layers))
        self.output = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text).transpose(1, 2)  # [batch, width, length]
        for i, layer in enumerate(self.layers):
            x = x + nn.functional.gelu(layer(nn.functional.pad(x, (2 ** (i + 1), 0))))
        return self.output(x.transpose(1, 2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    text, following = batch
    return cross_entropy(model(text).flatten(0, 1), following.flatten())


def files() -> list[Path]:
    """Those given as arguments, or the source text of Python's own library."""
    return [Path(name) for name in sys.argv[1:]] or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


job = atoll.Job(
    name="streaming text",
    model=NextByte,
    loss=loss,
    data=lambda: Stream(files()),
    num_workers=1,  # one process reads the stream ahead of time
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    batch_size=32,
    steps=300,
)

if __name__ == "__main__":
    job.run()
