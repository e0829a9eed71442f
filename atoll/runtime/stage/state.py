"""The weights a run starts from, and what else the program reads: buffers and constants, by the program's names."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from atoll.errors import CaptureError
from atoll.graph.capture import Captured
from atoll.model_identity import tied_names

__all__ = ["InitialState", "unread_names", "unread_state"]


class InitialState:
    """A built model as a source of values. It is read once, by whoever makes a stage, and then dropped: only the parts taken remain."""

    def __init__(self, captured: Captured, model: nn.Module) -> None:
        self._captured, self._model = captured, model
        self._targets = {
            spec.arg.name: str(spec.target)
            for spec in captured.program.graph_signature.input_specs
            if spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        }

    def parameter(self, name: str) -> nn.Parameter:
        """The whole parameter of this name."""
        return self._model.get_parameter(name)

    def buffer_name(self, placeholder: str) -> str | None:
        """The user's name of a buffer the program reads; None for constants of the code."""
        name = self._targets[placeholder].removeprefix("model.")
        return name if name in dict(self._model.named_buffers(remove_duplicate=False)) else None

    def value(self, placeholder: str) -> Tensor:
        """The value behind a buffer or constant of the program."""
        path = self._targets[placeholder].removeprefix("model.")
        found: Any = self._model
        for part in path.split("."):
            found = getattr(found, part, None)
        if isinstance(found, Tensor):
            return found.detach()
        constant = self._captured.program.constants.get(self._targets[placeholder])
        if not isinstance(constant, Tensor) or isinstance(constant, torch._subclasses.FakeTensor):
            raise CaptureError(f"the program reads the tensor {path!r}, which the built model does not have; register it as a buffer")
        return constant.detach()


def unread_state(captured: Captured, model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers that no operator reads: they keep their first values, and belong into checkpoints all the same."""
    values = model.state_dict()
    return {name: values[name].detach().clone() for name in unread_names(captured, model)}


def unread_names(captured: Captured, model: nn.Module) -> list[str]:
    """Their names; the model may be on the meta device."""
    table = captured.liveness.table
    read = {name for value, name in (*table.parameters.items(), *table.buffers.items()) if value.users} | tied_names(model).keys()
    return [name for name in model.state_dict() if name not in read]
