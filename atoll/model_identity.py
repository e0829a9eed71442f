"""What a model is besides its numbers: names that mean the same parameter, a Hugging Face configuration, a PEFT adapter.

Nothing of Hugging Face is loaded unless the model came from there.
"""

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

__all__ = ["Adapter", "ModelIdentity", "identify", "is_peft_model", "tied_names"]


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A PEFT adapter as its directory has it."""

    config: dict[str, Any]  # adapter_config.json
    names: dict[str, str]  # in adapter_model.safetensors → in the model
    problem: str = ""  # why it cannot be written from the model's weights alone


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written beside a model's weights for others to load them."""

    tied: dict[str, str] = {}  # other names of shared tensors → the name they are stored under
    model_config: dict[str, Any] | None = None  # of a Hugging Face model: config.json
    generation_config: dict[str, Any] | None = None  # of one that generates: generation_config.json
    adapter: Adapter | None = None  # of a PEFT model; `model_config` is then that of the model it adapts


def identify(model: Any) -> ModelIdentity:
    """What there is to say of a module; it may be on the meta device."""
    base = model.get_base_model() if is_peft_model(model) else model
    return ModelIdentity(
        tied=tied_names(model),
        model_config=_config(base),
        generation_config=_json_of(getattr(base, "generation_config", None)),
        adapter=_adapter(model),
    )


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names of parameters that are used under several → the first name, which is the one everything here uses."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = ((name, first[id(parameter)]) for name, parameter in model.named_parameters(remove_duplicate=False))
    return {name: known for name, known in names if name != known}


def is_peft_model(model: nn.Module) -> bool:
    """Whether `peft.get_peft_model` made it."""
    return any(kind.__module__ == "peft.peft_model" and kind.__name__ == "PeftModel" for kind in type(model).__mro__)


def _config(model: nn.Module) -> dict[str, Any] | None:
    """As `save_pretrained` writes it: with the class that is to be made of it."""
    config = _json_of(getattr(model, "config", None))
    return None if config is None else {**config, "architectures": config.get("architectures") or [type(model).__name__]}


def _json_of(config: object) -> dict[str, Any] | None:
    to_text = getattr(config, "to_json_string", None)
    return msgspec.json.decode(to_text(), type=dict[str, Any]) if to_text is not None else None


def _adapter(model: Any) -> Adapter | None:
    """Which weights are the adapter's is PEFT's own to say: it is asked about stand-ins that tell the model's names."""
    if not is_peft_model(model):
        return None
    from peft import get_peft_model_state_dict

    name = model.active_adapter
    state = dict(model.state_dict())
    known = {id(value): key for key, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says which embeddings it adds; they are among the names
        wanted = get_peft_model_state_dict(model, state_dict=state, adapter_name=name)
    computed = [key for key, value in wanted.items() if id(value) not in known]
    problem = f"{model.peft_config[name].peft_type.value} computes {computed[0]!r} when it is saved" if computed else ""
    names = {key: known[id(value)] for key, value in wanted.items() if id(value) in known}
    return Adapter(config=_adapter_config(model, name), names=names, problem=problem)


def _adapter_config(model: Any, name: str) -> dict[str, Any]:
    """As `PeftModel.save_pretrained` writes it."""
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True
    base = type(model.get_base_model())
    mapping = {"base_model_class": base.__name__, "parent_library": base.__module__} if config.task_type is None else None
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return msgspec.json.decode((Path(folder) / "adapter_config.json").read_bytes(), type=dict[str, Any])
