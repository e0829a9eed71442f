"""Buffers that a forward changes: every micro-batch's forward and backward see the values that one process's would, recomputed or not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from atoll.errors import CaptureError
from atoll.graph.capture import capture_program

from .stage_chain import Chain, job_of


class Averaged(nn.Module):
    """A running average that is changed and then multiplied in; how is left to others."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("average", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.gelu(self.middle(self.change(functional.gelu(self.first(x))))))

    def change(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        return x * self.average


class InRegion(Averaged):
    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
        return x * self.average


class PartInRegion(Averaged):
    def change(self, x: Tensor) -> Tensor:
        x = x / self.average[1].clone()
        with torch.no_grad():
            self.average[1:3].copy_(x.abs().mean(0)[1:3])
        return x * self.average


class ReadInRegion(Averaged):
    def change(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            self.average.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
            return x * self.average


class Assigned(Averaged):
    def change(self, x: Tensor) -> Tensor:
        x = x * self.average
        self.average = 0.9 * self.average + 0.1 * x.detach().abs().mean(0)
        return x * self.average


class AssignedAndRead(Averaged):
    def change(self, x: Tensor) -> Tensor:
        before = self.average
        self.average = x.mean(0).detach()
        return x * self.average + before


class NormInRegion(Averaged):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def change(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.norm(x) * self.average


class Spectral(Averaged):
    def __init__(self) -> None:
        super().__init__()
        self.middle = spectral_norm(nn.Linear(6, 6))

    def change(self, x: Tensor) -> Tensor:
        return x


def squares(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def vectors(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 6)}


@pytest.mark.parametrize("build", [Averaged, InRegion, PartInRegion, ReadInRegion, Assigned, AssignedAndRead, NormInRegion, Spectral])
def test_micro_batches_under_way_together_are_as_one_after_another(build: type[nn.Module]) -> None:
    captured = capture_program(job_of(build, squares, vectors))
    assert len(captured.graph.cuts) >= 2
    for recompute in (False, True):
        torch.manual_seed(3)
        model, batches = build(), [vectors(4) for _ in range(3)]
        chain = Chain(captured, model, [0, *captured.graph.cuts, len(captured.graph.layers)], recompute=recompute)
        losses = chain.losses(batches)
        changed = {name for module in chain.modules for name in module.changed_buffers()}
        own = {name: buffer for module in chain.modules for name, buffer in module.buffers_by_name().items()}
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for batch, loss in zip(batches, losses, strict=True):
            true = squares(model, batch)
            true.backward()  # type: ignore[no-untyped-call]
            assert torch.allclose(loss, true)
        assert changed == {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])} != set()
        for name in changed:
            assert torch.allclose(own[name], model.get_buffer(name), rtol=1e-5), name
        for name, parameter in model.named_parameters():
            assert torch.allclose(chain.parameters[name].grad, parameter.grad, rtol=1e-4, atol=1e-7), name  # type: ignore[arg-type]


class Counting(Averaged):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None)

    def change(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Reentrant(Averaged):
    def change(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(torch.tanh, x, use_reentrant=True)
        return result


class NoGradInAutocast(Averaged):
    def change(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            with torch.no_grad():
                weight = torch.tanh(x)
            return x * weight


class Growing(Averaged):
    def change(self, x: Tensor) -> Tensor:
        self.average = torch.cat([self.average, x.detach().mean(0)])
        return x


class Momentum(Averaged):
    """An encoder that follows another one, as parameters without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.following = nn.Parameter(torch.ones(6, 6), requires_grad=False)

    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.following.mul_(0.9).add_(self.first.weight, alpha=0.1)
        return x @ self.following


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Momentum, r"the forward changes the parameter 'following' in place, .* Make it a buffer"),
        (Counting, r"batchnorm\.py:\d+ asks for the value of the buffer 'norm.num_batches_tracked', which every step changes"),
        (Reentrant, r"use_reentrant=True, through which gradients cannot be followed; pass use_reentrant=False"),
        (NoGradInAutocast, r"uses `no_grad` inside of `autocast`, where capture does not see it; put `autocast` inside of `no_grad`"),
        (Growing, r"replaces its buffer 'average' by one of another shape or type; write `self.average.copy_"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(build: type[nn.Module], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture_program(job_of(build, squares, vectors))
