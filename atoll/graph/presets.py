"""Models by name, from their published shapes: `preset("gpt3-175b")`.

`PRESETS` lists them. A preset is a Graph and what else planning needs to know: the batch it was trained with and its optimizer.
"""

from difflib import get_close_matches

import msgspec

from atoll.errors import JobError
from atoll.graph.graph import Graph, Precision
from atoll.graph.preset_decoders import GPT_MODELS, LLAMA_MODELS
from atoll.graph.preset_entry import PresetEntry
from atoll.graph.preset_others import OTHER_MODELS

__all__ = ["PRESETS", "Preset", "PresetEntry", "preset"]

PRESETS: tuple[PresetEntry, ...] = (*GPT_MODELS, *LLAMA_MODELS, *OTHER_MODELS)


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
        graph=entry.build(name=entry.name, precision=precision or entry.precision),
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
