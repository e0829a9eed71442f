"""A GAN that learns points on a ring: two losses, each with an optimizer of its own, in one job.

    python examples/gan.py                                   here
    torchrun --nproc-per-node 2 examples/gan.py              two processes share every batch
    atoll run examples/gan.py --cluster here.toml            on whatever there is

In every step the discriminator is trained by its loss, then the generator by its own; gradients reach only the one whose turn it is.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

import atoll

NOISE = 8


class Ring:
    """Points near the unit circle; a sample is a point and the noise that the generator makes another from."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        angle = 2 * math.pi * torch.rand(())  # seeded by the sample's position, wherever it is loaded
        point = torch.stack([angle.cos(), angle.sin()]) + 0.05 * torch.randn(2)
        return point, torch.randn(NOISE)


class Gan(nn.Module):
    """Both players; losses and optimizers are named after them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def discriminator_loss(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    points, noise = batch
    real, made = model.discriminator(points), model.discriminator(model.generator(noise).detach())
    return binary_cross_entropy_with_logits(real, torch.ones_like(real)) + binary_cross_entropy_with_logits(made, torch.zeros_like(made))


def generator_loss(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    return softplus(-model.discriminator(model.generator(batch[1]))).mean()


def distance(model: Gan, batch: tuple[Tensor, Tensor]) -> Tensor:
    """How far generated points are from the ring, on average."""
    away: Tensor = model.generator(batch[1]).norm(dim=1) - 1
    return away.abs().mean()


adam = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.9))
job = atoll.Job(
    name="gan",
    model=Gan,
    loss={"discriminator": discriminator_loss, "generator": generator_loss},
    optimizer={"discriminator": adam, "generator": adam},
    data=Ring(),
    batch_size=64,
    steps=600,
    eval_data=[Ring()[i] for i in range(256)],
    eval_loss=distance,
    eval_every=200,
)

if __name__ == "__main__":
    job.run()
