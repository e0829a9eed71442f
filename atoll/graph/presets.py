"""Models by name, from their published shapes: `preset("gpt3-175b")`.

`PRESETS` lists those of `presets.toml`: dense decoders (GPT-2 and -3, Megatron's sizes, ERNIE, M6-10B, Llama), mixtures of experts,
encoders, encoder–decoders, recurrent and image models. A preset is a Graph and what else planning needs to know: the batch it was trained
with and its optimizer.
"""

import tomllib
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

import msgspec

from atoll.errors import JobError
from atoll.graph import generate
from atoll.graph.graph import Graph, Precision

__all__ = ["PRESETS", "Preset", "PresetEntry", "preset"]


class PresetEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `parameters` is the published count; `build` names the generator in `atoll.graph.generate`."""

    name: str
    description: str
    parameters: float
    source: str
    batch_size: int
    build: str
    precision: Precision = "fp16"
    optimizer: str = "adamw"
    shape: dict[str, Any]

    def graph(self, precision: Precision) -> Graph:
        """The model's graph in that precision."""
        made: Graph = getattr(generate, self.build)(name=self.name, precision=precision, **self.shape)
        return made


def _published() -> tuple[PresetEntry, ...]:
    """The models of every family, in the file's order."""
    document = tomllib.loads(files("atoll.graph").joinpath("presets.toml").read_text("utf-8"))
    models = [family | model for family in document["family"] for model in family.pop("models")]
    return tuple(_entry(model) for model in models)


def _entry(model: dict[str, Any]) -> PresetEntry:
    shape = {key: value for key, value in model.items() if key not in PresetEntry.__struct_fields__}
    return msgspec.convert(model | {"shape": shape, "description": model["description"].format_map(shape)}, PresetEntry)


PRESETS: tuple[PresetEntry, ...] = _published()


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A published model, ready to be planned. `batch_size` is in samples (sequences, images, sentence pairs)."""

    graph: Graph
    batch_size: int
    optimizer: str
    description: str
    source: str


def preset(name: str, *, precision: Precision | None = None, batch_size: int | None = None) -> Preset:
    """The model of that name, in its own precision and batch size unless others are given."""
    entry = next((entry for entry in PRESETS if entry.name == name.lower()), None)
    if entry is None:
        raise JobError(_unknown(name))
    if batch_size is not None and batch_size < 1:
        raise JobError(f"{name}: batch_size must be at least 1, got {batch_size}")
    return Preset(
        graph=entry.graph(precision or entry.precision),
        batch_size=batch_size or entry.batch_size,
        optimizer=entry.optimizer,
        description=entry.description,
        source=entry.source,
    )


def _unknown(name: str) -> str:
    names = [entry.name for entry in PRESETS]
    near = get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(repr(other) for other in near)}?" if near else f"there are: {', '.join(names)}"
    return f"no preset is called {name!r}; {hint}"
