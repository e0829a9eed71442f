"""An image classifier: a small residual network learns to tell discs, squares, triangles and crosses apart.

python examples/image_classifier.py            trains here, alone, in about half a minute
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import atoll
from atoll.data import Shapes


class Residual(nn.Module):
    """Two convolutions, added to what came in."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(4, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(4, channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.first_norm(self.first(x)))
        return relu(self.shortcut(x) + self.second_norm(self.second(y)))


def residual_network() -> nn.Module:
    return nn.Sequential(
        Residual(1, 16, stride=2),  # [batch, 16, 16, 16]
        Residual(16, 32, stride=2),  # [batch, 32, 8, 8]
        Residual(32, 64, stride=2),  # [batch, 64, 4, 4]
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, len(Shapes.classes)),
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return (model(images).argmax(-1) == labels).float().mean()


job = atoll.Job(
    name="image classifier",
    model=residual_network,
    loss=loss,
    data=Shapes(count=4000),
    eval_data=Shapes(count=400, first=4000),
    eval_every=50,
    metrics={"accuracy": accuracy},
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    batch_size=32,
    steps=200,
)

if __name__ == "__main__":
    job.run()
