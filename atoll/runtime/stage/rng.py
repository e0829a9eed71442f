"""Random numbers of a run: every draw of dropout is a function of the job's seed, the step, the samples and which draw of the model it is.

So a micro-batch gives the same numbers on whatever rank, in whatever order and however often it is computed.
"""

import threading
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from atoll.graph.spec_augment import draw_mask, replaced_masks
from atoll.randomness import mix

__all__ = ["Draw", "DrawKey", "EagerDraws", "draws"]


class DrawKey:
    """What the draws under way depend on: set before each micro-batch, and again before it is computed once more in backward."""

    def __init__(self, seed: int, first: int = 0) -> None:
        """`first` is where the samples that are counted here begin in the global batch."""
        self._first = first
        self.place = torch.tensor([seed if seed < 2**63 else seed - 2**64, 0, 0, 0])  # for compiled code, which takes numbers for constants
        self._step = self._first_sample = self._turn = 0
        self.seed = seed
        self.lock = threading.Lock()  # held while draws are made: loading data in another thread seeds the same generators

    @property
    def step(self) -> int:
        """Counted from 1."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = self.place[1] = step

    @property
    def first_sample(self) -> int:
        """Of the samples under way, of those that are counted here."""
        return self._first_sample

    @first_sample.setter
    def first_sample(self, first: int) -> None:
        self._first_sample, self.place[2] = first, first + self._first

    @property
    def turn(self) -> int:
        """Of the step, where a job has several losses."""
        return self._turn

    @turn.setter
    def turn(self, turn: int) -> None:
        self._turn = self.place[3] = turn

    def of(self, number: int) -> int:
        """The seed of the model's draw `number`."""
        return mix(self.seed, 5, self.step, self._first + self.first_sample, number, *self.of_turn)

    @staticmethod
    def seed_of(place: Tensor, number: int) -> int:
        """What `of` says where the key is at that `place`."""
        seed, step, first, turn = place.tolist()
        return mix(seed % 2**64, 5, step, first, number, *((turn,) if turn else ()))

    @property
    def of_turn(self) -> tuple[int, ...]:
        """What seeds of a turn have besides; nothing in the first."""
        return (self.turn,) if self.turn else ()


class Draw(nn.Module):
    """Stands before a random operator in a unit's graph and seeds its generator."""

    def __init__(self, key: DrawKey, device: torch.device) -> None:
        super().__init__()
        self.key, self.on_cpu = key, device.type == "cpu"

    def forward(self, number: int) -> None:
        """Seed the generator of the operator that follows."""
        if self.on_cpu:
            torch.default_generator.manual_seed(self.key.of(number))  # `torch.manual_seed` looks at every kind of device first
        else:
            torch.manual_seed(self.key.of(number))


class EagerDraws(TorchFunctionMode):
    """Around an eager forward: seeds every random call as `Draw` seeds the captured program's, so that both draw the same numbers.

    SpecAugment of `model`, which draws with NumPy, is such a call.
    """

    def __init__(self, key: DrawKey, model: nn.Module) -> None:
        super().__init__()
        self._key = key
        self._masks = replaced_masks(model, self._draw_mask)
        self.count = 0

    def __enter__(self) -> Self:
        self._masks.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self._masks.__exit__(None, None, None)

    def seed(self) -> None:
        """Before the next draw."""
        torch.manual_seed(self._key.of(self.count))
        self.count += 1

    def _draw_mask(self, *args: Any, **kwargs: Any) -> Any:
        self.seed()
        return draw_mask(*args, **kwargs)

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        return self._drawn(function, args, kwargs) if draws(function, args, kwargs) else function(*args, **kwargs)

    def _drawn(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seed()
        return function(*args, **kwargs)


_DROPOUTS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.feature_dropout,
    torch.alpha_dropout,
)
_ALWAYS_RANDOM = (
    *(torch.bernoulli, torch.multinomial, torch.normal, torch.poisson, torch.rand, torch.randn, torch.randint, torch.randperm),
    *(torch.rand_like, torch.randn_like, torch.randint_like, functional.gumbel_softmax, functional.rrelu),
    *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.random_, Tensor.multinomial),
    *(Tensor.cauchy_, Tensor.log_normal_, Tensor.geometric_),
)
_INITIALISING = (Tensor.normal_, Tensor.uniform_)  # what modules that a forward builds begin with
_ATTENTION = functional.scaled_dot_product_attention
_MANY_HEADS = functional.multi_head_attention_forward
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_RANDOM_FUNCTIONS = frozenset([*_DROPOUTS, *_ALWAYS_RANDOM, *_RECURRENT, _ATTENTION, _MANY_HEADS])


def draws(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of PyTorch's draws random numbers."""
    return function in _RANDOM_FUNCTIONS and _is_on(function, args, kwargs)


def _is_on(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws: dropout may be off, by its probability or outside training; a module's first values are no draw."""
    if args and isinstance(args[0], nn.Parameter) and function in _INITIALISING:
        return False
    if function is _ATTENTION:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if function is _MANY_HEADS:
        training = args[13] if len(args) > 13 else kwargs.get("training", True)
        return bool(training) and bool(args[10] if len(args) > 10 else kwargs["dropout_p"])
    if function in _RECURRENT:
        layers, probability, training = args[5:8] if isinstance(args[3], (list, tuple)) else args[4:7]  # packed sequences have one more
        return layers > 1 and bool(probability) and bool(training)
    if function is functional.rrelu:
        return bool(args[3] if len(args) > 3 else kwargs.get("training", False))
    if function in _DROPOUTS:
        probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        return bool(probability) and bool(training)
    return True
