"""Training as anyone would write it: the whole batch through the model as it is, `model(**batch).loss`, backward, the optimizer.

Where a model draws random numbers, or normalises over a batch, the numbers are those of the pieces that a plan cuts the batch into
(docs/lockstep.md): each piece's are drawn with the piece's seed and put beside one another, for the same forward of the whole batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.graph.spec_augment import draw_mask
from atoll.randomness import mix, seed_everything
from atoll.runtime.stage.rng import DrawKey, EagerDraws, draws

Pieces = Sequence[tuple[int, int]]
Optimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass
class Trained:
    """What a run came to."""

    losses: list[float]
    weights: dict[str, Tensor]
    depends_on_pieces: bool = False


class PiecewiseDraws(EagerDraws):
    """Around a forward of the whole batch: random operators and batch normalisation see one piece after another."""

    def __init__(self, key: DrawKey, model: nn.Module, pieces: Pieces) -> None:
        super().__init__(key, model)
        self._pieces, self._samples = pieces, pieces[-1][1]
        self.normalised = False

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.batch_norm and (args[5] if len(args) > 5 else kwargs.get("training", False)):
            pieces = [self._cut(args[0], start, stop) for start, stop in self._pieces]
            if pieces[0] is args[0]:  # it normalises weights
                return function(*args, **kwargs)
            self.normalised = True
            return torch.cat([function(piece, *args[1:], **kwargs) for piece in pieces])
        if not draws(function, args, kwargs):
            return function(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        return self._by_pieces(function, args, kwargs, lambda: torch.manual_seed(self._key.of(number)))

    def _by_pieces(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: Callable[[], Any]) -> Any:
        results = []
        for start, stop in self._pieces:
            self._key.first_sample = start
            own, named = self._cut(args, start, stop), {name: self._cut(value, start, stop) for name, value in kwargs.items()}
            seed()
            results.append(function(*own, **named))
            if own is args and all(named[name] is kwargs[name] for name in kwargs):  # nothing in it belongs to samples
                return results[0]
        if isinstance(results[0], Tensor):
            return args[0].copy_(torch.cat(results)) if _in_place(function, kwargs) else torch.cat(results)
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

    def _cut(self, value: Any, start: int, stop: int) -> Any:
        """The piece's part: of tensors whose first dimension goes with the samples, and of shapes that begin with their number."""
        if isinstance(value, Tensor) and value.dim() and value.shape[0] % self._samples == 0 and value.shape[0]:
            each = value.shape[0] // self._samples
            return value[start * each : stop * each]
        if isinstance(value, torch.Size | list | tuple):
            parts = [self._cut(one, start, stop) for one in value]
            if value and type(value[0]) is int and value[0] % self._samples == 0 and value[0]:
                parts[0] = value[0] // self._samples * (stop - start)
            same = all(a is b for a, b in zip(parts, value, strict=True))
            return value if same else type(value)(parts)
        return value

    def _draw_mask(self, module: str, shape: tuple[int, int], *args: Any, **kwargs: Any) -> Any:
        import numpy

        number, self.count = self.count, self.count + 1
        masks = []
        for start, stop in self._pieces:
            self._key.first_sample = start
            torch.manual_seed(self._key.of(number))
            named = {name: self._cut(value, start, stop) for name, value in kwargs.items()}
            masks.append(draw_mask(module, (stop - start, shape[1]), *(self._cut(value, start, stop) for value in args), **named))
        return numpy.concatenate(masks)


def _in_place(function: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(function, "__name__", "")
    return bool(kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))


def train(model: nn.Module, loss: Any, batches: Sequence[Any], pieces: Pieces, optimizer: Optimizer, seed: int) -> Trained:
    """A step for every batch."""
    _with_simple_experts(model)
    model.train()
    optimize = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses, depends = [], False
    for step, batch in enumerate(batches, 1):
        key = DrawKey(seed)
        key.step = step
        own = {name: value.clone() for name, value in batch.items()}
        with PiecewiseDraws(key, model, pieces) as drawn:
            value = loss(model, own)
        optimize.zero_grad()
        value.backward()
        optimize.step()
        losses.append(float(value.detach()))
        depends |= drawn.count > 0 or drawn.normalised
    return Trained(losses, {name: parameter.detach() for name, parameter in model.named_parameters()}, depends)


def train_in_pieces(
    model: nn.Module, loss: Any, batches: Sequence[Any], pieces: Pieces, optimizer: Optimizer, seed: int, share: Callable[[Any, Any], float]
) -> Trained:
    """A step for every batch, piece by piece: for models that draw in Python, where the whole batch would have one layer drop.

    The generators are seeded for each piece as a micro-batch's are (docs/job.md); `share` is what a piece counts for in the batch's loss.
    """
    model.train()
    optimize = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses, key = [], DrawKey(seed)
    for step, batch in enumerate(batches, 1):
        optimize.zero_grad()
        values = []
        for number, (start, stop) in enumerate(pieces):
            key.step, key.first_sample = step, start
            piece = {name: value[start:stop].clone() for name, value in batch.items()}
            seed_everything(mix(seed, 5, step, number))
            with EagerDraws(key, model):
                value = loss(model, piece) * share(piece, batch)
            value.backward()
            values.append(float(value.detach()))
        optimize.step()
        losses.append(sum(values))
    return Trained(losses, {name: parameter.detach() for name, parameter in model.named_parameters()}, True)


def _with_simple_experts(model: nn.Module) -> None:
    """Hugging Face's mixtures as a loop over experts: nothing like what is tested."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
