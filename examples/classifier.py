"""A classifier with 100,000 classes, annotated: who is on the photograph? Nine tenths of its weights are the last layer's.

Data parallelism would send the gradient of that layer through the network in every step; dividing the small network in front of it is not
worth it. Two lines demand the better way: everything in front is repeated on every device, each with its share of the photographs, and the
last layer is divided between the same devices, so that only features and sums cross the network. Trained alone they change nothing.

python examples/classifier.py                  trains here, alone, in about a minute
atoll plan examples/classifier.py --cluster examples/clusters/one_host.toml
"""

from functools import partial

import torch
from image_classifier import Residual, loss
from torch import Tensor, nn

import atoll

CLASSES = 100_000
WIDTH = 256


class Photographs:
    """Photographs of people, some of them famous: person k is seen ten times as often as person 10·k. A sample is `(image, person)`."""

    def __init__(self, *, count: int, size: int = 32) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = torch.rand((), generator=torch.Generator().manual_seed(index))
        person = int(CLASSES**place) - 1
        face = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(CLASSES + person))
        image = face.repeat_interleave(self.size // 8, 1).repeat_interleave(self.size // 8, 2)  # [1, size, size]
        return image + 0.3 * torch.randn(image.shape, generator=torch.Generator().manual_seed(index)), torch.tensor(person)


def classifier() -> nn.Module:
    with atoll.replica():
        features = nn.Sequential(
            Residual(1, 32, stride=2),  # [batch, 32, 16, 16]
            Residual(32, 64, stride=2),  # [batch, 64, 8, 8]
            Residual(64, WIDTH, stride=2),  # [batch, 256, 4, 4]
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
    with atoll.split():
        people = nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(features, people)


job = atoll.Job(
    name="classifier",
    model=classifier,
    loss=loss,
    data=Photographs(count=100_000),
    optimizer=partial(torch.optim.AdamW, lr=2e-3, fused=True),
    batch_size=32,
    steps=100,
)

if __name__ == "__main__":
    job.run()
