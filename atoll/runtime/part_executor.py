"""PartExecutor: what one part of a collaboration computes in a step: what it sends, the gradients of what it received, its own step.

Whether the others are in this process or at another site is the caller's business; the numbers are the same.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from atoll.blame import users_code
from atoll.codec.registry import make_codec
from atoll.collaboration import Collaboration
from atoll.data import Batch
from atoll.errors import CodecError, JobError, JobFailedError
from atoll.job import LossValue, read_loss
from atoll.randomness import mix, seed_everything
from atoll.runtime.nonfinite import checked_weight
from atoll.runtime.stage.rng import DrawKey, EagerDraws

__all__ = ["PartExecutor", "PartLoss", "Returned", "added", "crossed"]


class PartLoss(NamedTuple):
    """What a part's loss was, and what it was divided by."""

    value: float
    weight: float


class Returned(NamedTuple):
    """The gradient of something received, and the loss it is of where that trains the sender alone."""

    gradient: Tensor
    loss: float | None = None


def crossed(name: str, value: Tensor, codec: str) -> Tensor:
    """What arrives of a tensor that is sent with this codec, on the device it was on; never the same memory."""
    try:
        found = make_codec(codec)
        return found.decode(found.encode(value)).to(value.device, copy=True)
    except CodecError as error:
        raise JobFailedError(f"sending {name!r}: {error}") from error


def added(gradients: Sequence[Tensor]) -> Tensor:
    """What several receivers returned, one after another, so that the sum is the same wherever they are."""
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total


class PartExecutor:
    """Computes a part's steps: `forward`, then `backward`; its optimizer is the caller's. Parts that do not train only go forward."""

    def __init__(self, job: Collaboration, name: str, model: nn.Module, device: torch.device) -> None:
        self.name, self.part, self.model = name, job.parts[name], model
        self.returns = [sent for sent in self.part.codecs if job.returned_by(sent)]
        """What it sends that a gradient comes back for."""
        self.loss: PartLoss | None = None  # of the last forward, if it has one of its own
        self._job, self._device = job.part_jobs[name], device
        self._key = DrawKey(job.part_seed(name))
        self._root: Tensor | None = None
        self._entered: dict[str, Tensor] = {}
        self._sent: dict[str, Tensor] = {}
        self._taught: dict[str, Returned] = {}
        if not self.part.trains:
            model.eval().requires_grad_(False)

    def forward(self, step: int, batch: Batch, received: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """What it sends, without the graphs, which are kept for `backward`. A loss that is not finite is the caller's to see."""
        self._key.step, self._root, self.loss, self._taught = step, None, None, {}
        self._entered = {
            name: value.detach().requires_grad_() for name, value in received.items() if value is not None and self._flows_back(name, value)
        }
        given = {**received, **self._entered}
        what = "the loss" if self.part.loss is not None else "forward"
        with nullcontext() if self.part.trains else torch.no_grad():
            result = self._call(step, 0, what, self.part.loss or self.part.forward or self._plain, batch, given)
            sent = self._read(step, result)
        for number, (name, how) in enumerate(self.part.wanted.items(), 1):
            value = received[name]
            if callable(how.gradient) and value is not None:
                self._taught[name] = self._teach(step, number, name, batch, {**received, name: value.detach().requires_grad_()})
        self._sent = {name: sent[name] for name in self.returns}
        return {name: value.detach() for name, value in sent.items()}

    def backward(self, step: int, returned: Mapping[str, Tensor]) -> dict[str, Returned]:
        """The gradients of what it received; those of its own parameters are added to `.grad`. Uses up what the forward kept."""
        roots: list[Tensor] = [] if self._root is None else [self._root]
        given: list[Tensor | None] = [None] * len(roots)
        for name, gradient in returned.items():
            if not self._sent[name].requires_grad:
                self._wrong(step, f"no gradient flows from {name!r} to the model, and one was returned for it; is it detached?")
            roots.append(self._sent[name])
            given.append(gradient.to(self._sent[name]))
        if roots:
            with users_code(f"step {step}: backward of {self.name}", JobFailedError):
                torch.autograd.backward(roots, given)
        back = {name: Returned(_gradient_of(value)) for name, value in self._entered.items()}
        found, self._root, self._entered, self._sent, self._taught = {**back, **self._taught}, None, {}, {}, {}
        return found

    def _flows_back(self, name: str, value: Tensor) -> bool:
        if self.part.wanted[name].gradient and not value.is_floating_point():
            self._wrong(None, f"{name!r} has {value.dtype}, which has no gradient; receive it without one")
        return self.part.wanted[name].gradient is True

    def _call(self, step: int, turn: int, what: str, function: Any, batch: Batch, received: Mapping[str, Tensor | None]) -> Any:
        self._key.turn = turn
        seed_everything(mix(self._key.seed, 5, step, 0, *self._key.of_turn), devices=self._device.type != "cpu")
        arguments: Sequence[Any] = (batch, received) if self.part.wanted else (batch,)
        doing = f"step {step}: {what} of {self.name}"
        with self._job.autocast(self._device), users_code(doing, JobFailedError), EagerDraws(self._key, self.model):
            return function(self.model, *arguments)

    def _plain(self, model: nn.Module, batch: Batch, received: Any = None) -> Any:
        return model(**batch) if isinstance(batch, Mapping) else model(batch)

    def _read(self, step: int, result: Any) -> dict[str, Tensor]:
        """The loss is noted; what is sent is returned."""
        if self.part.loss is None:
            return self._read_sent(step, result)
        sent: dict[str, Tensor] = {}
        if self.part.codecs:
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
                self._wrong(step, "its loss must return a pair: the loss, and what is sent, by name")
            sent, result = self._read_sent(step, result[1]), result[0]
        self._root, self.loss = self._mean(step, "loss", read_loss(result, f"{self.name}: loss"))
        if not self._root.requires_grad and not self.returns:
            self._wrong(step, "no gradient flows from its loss to the model; is it computed under no_grad, or detached?")
        if not self._root.requires_grad:
            self._root = None
        return sent

    def _read_sent(self, step: int, result: Any) -> dict[str, Tensor]:
        names = list(self.part.codecs)
        if isinstance(result, Tensor) and len(names) == 1:
            return {names[0]: result}
        found = result if isinstance(result, Mapping) else {name: getattr(result, name, None) for name in names}
        sent: dict[str, Tensor] = {}
        for name in names:
            value = found.get(name)
            if not isinstance(value, Tensor):
                self._wrong(step, f"it sends {name!r}, which must be a tensor, but it returned {_kind(result)}")
            sent[name] = value
        return sent

    def _teach(self, step: int, number: int, name: str, batch: Batch, received: Mapping[str, Tensor | None]) -> Returned:
        """By a function of its own, whose gradient trains the sender and not this part."""
        what = f"the gradient function for {name!r}"
        value = read_loss(self._call(step, number, what, self.part.wanted[name].gradient, batch, received), f"{self.name}: {what}")
        root, loss = self._mean(step, what, value)
        leaf = received[name]
        assert leaf is not None
        if not root.requires_grad:
            self._wrong(step, f"{what} does not depend on it")
        with users_code(f"step {step}: backward of {what} of {self.name}", JobFailedError):
            (gradient,) = torch.autograd.grad(root, [leaf], allow_unused=True)
        return Returned(torch.zeros_like(leaf) if gradient is None else gradient, loss.value)

    def _mean(self, step: int, what: str, found: LossValue) -> tuple[Tensor, PartLoss]:
        if found.weight is None:
            return found.value, PartLoss(float(found.value.detach()), float(self._job.batch_size))
        weight = checked_weight(f"step {step}, {self.name}: {what}", float(found.weight))
        mean = found.value / found.weight
        return mean, PartLoss(float(mean.detach()), weight)

    def _wrong(self, step: int | None, what: str) -> NoReturn:
        raise JobError(f"collaborate: {self.name}{'' if step is None else f', step {step}'}: {what}")


def _gradient_of(value: Tensor) -> Tensor:
    return torch.zeros_like(value) if value.grad is None else value.grad


def _kind(value: Any) -> str:
    return f"{type(value).__name__} with {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
