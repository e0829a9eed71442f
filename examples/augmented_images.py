"""An image job with augmentation: worker processes turn, shift and noise the images while the device trains on those before.

python examples/augmented_images.py            trains here, alone, in about half a minute
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import WeightedRandomSampler

import atoll
from atoll.data import Shapes


class Augmented:
    """Images as the model never saw them. Random numbers are seeded for every sample: whoever loads it, it is the same."""

    def __init__(self, images: Shapes) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]  # [1, 32, 32]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        down, right = torch.randint(-3, 4, (2,)).tolist()
        image = image.roll((down, right), dims=(-2, -1))
        return image * torch.empty(()).uniform_(0.8, 1.2) + 0.1 * torch.randn_like(image), label


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.GELU(),
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


COUNT = 2000
recent = torch.linspace(1, 2, COUNT)  # the last images are seen twice as often as the first

job = atoll.Job(
    name="augmented images",
    model=network,
    loss=loss,
    data=Augmented(Shapes(count=COUNT)),
    sampler=WeightedRandomSampler(recent.tolist(), COUNT),
    num_workers=2,
    eval_data=Shapes(count=200, first=COUNT),
    eval_every=100,
    metrics={"accuracy": accuracy},
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    batch_size=32,
    steps=300,
)

if __name__ == "__main__":
    job.run()
