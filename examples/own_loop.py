"""Your own loop: Atoll makes one step of it, whatever the plan; what is around the step stays yours.

python examples/own_loop.py                    trains here, alone, in about a minute
torchrun --nproc-per-node 2 examples/own_loop.py
atoll run examples/own_loop.py --cluster examples/clusters/laptop.toml

Every process runs the whole loop, and gets the same numbers: only the step, evaluations and the weights are worked out together.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import atoll
from atoll.data import Shapes


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),  # [batch, 16, 16, 16]
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),  # [batch, 32, 8, 8]
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, len(Shapes.classes)),
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, classes = batch
    return functional.cross_entropy(model(images), classes)


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, classes = batch
    right: Tensor = model(images).argmax(dim=1) == classes
    return right.float().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", help="a new directory for checkpoints and everything else about the run")
    parser.add_argument("--resume", help="the directory of a run to go on with")
    parser.add_argument("--weights", type=Path, help="where to write the trained weights")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights in every process
    model = network()
    held_out = Shapes(count=256, first=1_000_000)
    with atoll.step(
        model,
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        data=Shapes(count=4096),
        metrics={"accuracy": accuracy},
        eval_data=held_out,
        batch_size=32,
        steps=options.steps,
        out=options.out,
        resume=options.resume,
    ) as step:
        smooth = None
        for batch in step.batches():
            found = step(batch)
            smooth = found if smooth is None else 0.9 * smooth + 0.1 * found
            if step.number % 50 == 0:
                evaluated = step.evaluate(held_out)
                if step.rank == 0:
                    print(f"step {step.number}: loss {smooth:.3f}, accuracy {evaluated.metrics['accuracy']:.1%}")
                if (evaluated.loss or 0.0) < 0.02:
                    break  # all processes see the same loss, so all of them leave here
        weights = step.state_dict()  # of the whole model, in the first process
    if weights and options.weights is not None:
        torch.save(weights, options.weights)


if __name__ == "__main__":
    main()
