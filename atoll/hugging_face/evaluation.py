"""`compute_metrics` of a Trainer: all predictions in one place, made by the Trainer's own evaluation loop with the weights of the run."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["MetricsOnOneDevice"]


class MetricsOnOneDevice:
    """Evaluates as the Trainer does: in this process, with a whole model, whatever plan trains it."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        assert isinstance(trainer.model, nn.Module)
        self._model = _without_weights(trainer.model)

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """What `compute_metrics` finds, with the Trainer's own `eval_loss`."""
        self._model.load_state_dict(weights, assign=True)
        with self._in_its_place(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator")  # that is the Trainer's default
            output = self._trainer.evaluation_loop(self._trainer.get_eval_dataloader(), description="Evaluation", metric_key_prefix="eval")
        found = {name: float(value) for name, value in (output.metrics or {}).items() if isinstance(value, (int, float))}
        found.pop("eval_model_preparation_time", None)
        return found

    @contextmanager
    def _in_its_place(self) -> Iterator[None]:
        """The Trainer evaluates its model; here that is the whole one."""
        trainer, before = self._trainer, (self._trainer.model, self._trainer.model_wrapped)
        trainer.model = trainer.model_wrapped = self._model
        try:
            yield
        finally:
            trainer.model, trainer.model_wrapped = before


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy with buffers but with parameters that take no memory."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo)
