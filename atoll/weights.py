"""The weights a job starts from, where they are files: a Hugging Face directory or a safetensors file, read slice by slice.

Nobody needs a whole copy: `without_memory` builds a model whose parameters have none of their own, and whoever holds a part of a
parameter reads that part of it.
"""

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from atoll.errors import JobError
from atoll.model_identity import identify, is_peft_model, tied_names

__all__ = ["InitialWeights", "MatchedWeights", "without_memory"]

_INDEX = "model.safetensors.index.json"
_FROM_BASE = (True, False, "gaussian", "orthogonal")  # ways to begin an adapter that do not look at the weights it adapts


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class InitialWeights:
    """A directory as `save_pretrained` or `atoll export` leaves it, or one safetensors file."""

    path: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        """Stored name → the file it is in."""
        index = self.path / _INDEX
        try:
            if index.is_file():
                listed = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
                return {name: self.path / file for name, file in listed.items()}
            file = self.path / "model.safetensors" if self.path.is_dir() else self.path
            with safe_open(file, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), file)
        except (OSError, msgspec.DecodeError, SafetensorError) as error:
            wanted = f"a safetensors file, or a directory with model.safetensors or {_INDEX}"
            raise JobError(f"Job: weights: {self.path} is not {wanted}: {error}") from error

    @contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        try:
            with safe_open(file, framework="pt") as opened:
                yield opened
        except (OSError, SafetensorError) as error:
            raise JobError(f"Job: weights: cannot read {file}: {error}") from error

    def match(self, model: nn.Module) -> "MatchedWeights":
        """What of the model is stored, under which name. JobError where something is missing that must not be, or has another shape."""
        state, tied = model.state_dict(), tied_names(model)
        free = _free_names(model)
        names: dict[str, str] = {}
        for name in state:
            if name not in tied:
                aliases = [name, *(alias for alias, known in tied.items() if known == name)]
                found = next((stored for alias in aliases for stored in _stored_names(alias, model) if stored in self.files), None)
                if found is not None and name not in free:
                    names[name] = found
        missing = [name for name in state if name not in names and name not in tied]
        self._check_missing(model, [name for name in missing if name not in free], bool(names))
        self._check_shapes(names, {name: tuple(value.shape) for name, value in state.items()})
        used = {stored for name in state for stored in _stored_names(name, model)}
        return MatchedWeights(self, names, tuple(missing), tuple(sorted(self.files.keys() - used)))

    def _check_missing(self, model: nn.Module, missing: Sequence[str], some: bool) -> None:
        wrong = [name for name in missing if not some or not _is_of_head(name, model)]
        if wrong:
            others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise JobError(
                f"Job: weights: {self.path} does not have {wrong[0]!r}{others}; where its names are not the model's own, "
                "load it in the model's callable (from_pretrained) instead"
            )

    def _check_shapes(self, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        for file in sorted({self.files[stored] for stored in names.values()}):
            with self._opened(file) as opened:
                for name, stored in names.items():
                    if self.files[stored] == file and tuple(opened.get_slice(stored).get_shape()) != shapes[name]:
                        there = list(opened.get_slice(stored).get_shape())
                        raise JobError(
                            f"Job: weights: {file}: {stored!r} has the shape {there} there and {list(shapes[name])} in the model"
                        )


@dataclass(frozen=True)
class MatchedWeights:
    """Which of a model's parameters and buffers are stored, and where."""

    source: InitialWeights
    names: Mapping[str, str]  # the model's → the stored one
    missing: tuple[str, ...] = ()  # keep what the model begins with: an adapter, a new head
    unused: tuple[str, ...] = ()  # stored, and the model has no such thing

    def fill(self, parts: Sequence[tuple[str, tuple[slice, ...], Tensor]]) -> None:
        """Read slices of the model's tensors into memory of the same shapes, in its dtype; names that are not stored are passed over."""
        by_file: dict[Path, list[tuple[str, tuple[slice, ...], Tensor]]] = {}
        for name, where, into in parts:
            if name in self.names:
                stored = self.names[name]
                by_file.setdefault(self.source.files[stored], []).append((stored, where, into))
        for file, wanted in sorted(by_file.items()):
            with self.source._opened(file) as opened, torch.no_grad():
                for stored, where, into in wanted:
                    into.copy_(opened.get_slice(stored)[where] if where else opened.get_tensor(stored))

    def fill_model(self, model: nn.Module) -> None:
        """Read all of it into a model that has memory of its own."""
        self.fill([(name, _everything(value), value) for name, value in model.state_dict().items()])

    def note(self) -> str | None:
        """A sentence on what is not as one might think; None where there is nothing to say."""
        said = []
        if self.missing:
            said.append(f"not there, and as the model begins them: {_some(self.missing)}")
        if self.unused:
            said.append(f"there, and not in the model: {_some(self.unused)}")
        return f"weights from {self.source.path}: {len(self.names)} tensors; {'; '.join(said)}" if said else None

    def digest(self) -> str:
        """Of what is stored, without reading it: names, and the files' sizes."""
        files = sorted({self.source.files[stored] for stored in self.names.values()})
        return ",".join(f"{file.name}:{file.stat().st_size}" for file in files) + f"/{len(self.names)}"


def _everything(value: Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in value.shape)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _stored_names(name: str, model: nn.Module) -> list[str]:
    """What a parameter may be called in a directory: by the model's name; by that of the model an adapter was put on; with or without
    the prefix of a model without its head."""
    name, base = _without_adapter(name, model)
    prefix = str(getattr(base, "base_model_prefix", ""))
    others = [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else []
    return list(dict.fromkeys([name, *others]))


def _without_adapter(name: str, model: Any) -> tuple[str, nn.Module]:
    """The name in the model that an adapter was put on, and that model."""
    if not is_peft_model(model):
        return name, model
    name = re.sub(r"^base_model\.(model\.)?", "", name)
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.", ".", name), model.get_base_model()


def _is_of_head(name: str, model: nn.Module) -> bool:
    """Whether it is outside the body of a Hugging Face model: a head for another task, which begins anew."""
    name, base = _without_adapter(name, model)
    prefix = str(getattr(base, "base_model_prefix", ""))
    return bool(prefix) and getattr(base, "base_model", base) is not base and not name.startswith(f"{prefix}.")


def _free_names(model: Any) -> set[str]:
    """What a directory need not have: an adapter's own parameters."""
    if not is_peft_model(model):
        return set()
    config = model.peft_config[model.active_adapter]
    begins = getattr(config, "init_lora_weights", True)
    if begins not in _FROM_BASE or getattr(config, "use_dora", False):
        way = "DoRA" if getattr(config, "use_dora", False) else f"init_lora_weights={begins!r}"
        raise JobError(
            f"Job: weights: {way} begins the adapter from the weights it adapts, so they must be loaded before: in the model's callable"
        )
    adapter = identify(model).adapter
    assert adapter is not None
    return {name for name in adapter.names.values() if ".modules_to_save." not in name}


def without_memory(
    build: Callable[[], nn.Module], match: Callable[[nn.Module], MatchedWeights], dtype: torch.dtype | None = None
) -> tuple[nn.Module, MatchedWeights]:
    """Build a model whose stored parameters lie on top of each other in memory of the largest one's size; the others are as built.

    Constructors write numbers into it as they would anyway, so random numbers are drawn as in a whole model. Which parameter is stored is
    known by its name only after building: where some are not, it is built a second time. It is in another `dtype` afterwards if so asked.
    """
    model, order = _built_in_scratch(build, lambda number: True)
    matched = match(model)
    number_of = {id(parameter): number for number, parameter in enumerate(order)}
    own = {number_of.get(id(parameter), -1) for name, parameter in model.named_parameters() if name not in matched.names}
    if own:
        model, _ = _built_in_scratch(build, lambda number: number not in own)
    if dtype is not None:
        stored = [value for name, value in model.named_parameters() if name in matched.names and value.is_floating_point()]
        scratch = torch.empty(max((value.numel() for value in stored), default=0), dtype=dtype)
        for value in stored:
            value.data = scratch[: value.numel()].view(value.shape)
        model.to(dtype)
    return model, matched


def _built_in_scratch(build: Callable[[], nn.Module], in_scratch: Callable[[int], bool]) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model, and its parameters in the order in which they were made."""
    order: list[nn.Parameter] = []
    seen: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}  # by id: what was registered, and what is in its place
    scratch: dict[torch.dtype, Tensor] = {}

    def put(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type != "cpu" or not parameter.is_contiguous():
            return None
        before = seen.get(id(parameter))
        if before is not None and before[0]() is parameter:
            return before[1]
        kept = parameter
        if in_scratch(len(order)):
            room = scratch.get(parameter.dtype)
            if room is None or room.numel() < parameter.numel():
                room = scratch[parameter.dtype] = torch.empty(parameter.numel(), dtype=parameter.dtype)
            kept = nn.Parameter(room[: parameter.numel()].view(parameter.shape), requires_grad=parameter.requires_grad)
            kept.__dict__.update(parameter.__dict__)
        order.append(kept)
        seen[id(parameter)] = weakref.ref(parameter), kept
        seen[id(kept)] = weakref.ref(kept), kept
        return kept

    handle = register_module_parameter_registration_hook(put)  # type: ignore[arg-type]
    try:
        return build(), order
    finally:
        handle.remove()
