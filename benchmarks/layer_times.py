"""Measured layer times from a table, matched to a graph's layers and to the catalogue's kinds: what goes before the roofline.

The table has a row for each model, GPU, micro-batch, tensor degree and layer: `model,gpu,micro_batch,tp,layer,fwd_s,bwd_s,update_s`, in
seconds. Layers are numbered as they run. Where the table counts more layers than the graph (a final norm of its own, say), those beyond
are added to the graph's last.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from atoll.cluster.kinds import catalogue
from atoll.cost.calibration import LayerTime
from atoll.errors import PlanError
from atoll.graph import Graph

__all__ = ["kind_named", "read_layer_times"]

COLUMNS = ("model", "gpu", "micro_batch", "tp", "layer", "fwd_s", "bwd_s", "update_s")
_PREFIXES = {"GH-": "GH200-"}  # a product line's short name


class LayerTimes(NamedTuple):
    """What a table says of one model, and what of it could not be used, in sentences."""

    times: tuple[LayerTime, ...]
    left_out: tuple[str, ...]


class _Setting(NamedTuple):
    gpu: str
    samples: int
    tensor: int


_Seconds = tuple[float, float, float]


def read_layer_times(path: "str | Path", graph: Graph, model: str = "") -> LayerTimes:
    """The times of `model` (needed when the table has several) for the layers of `graph`, for `Calibration.layer_times`.

    A setting that has fewer layers than the graph, or an unknown GPU, is left out and named. PlanError names the line that is wrong.
    """
    tables = _read(Path(path))
    if model not in tables:
        if model or len(tables) != 1:
            asked = f"no model is called {model!r}" if model else "the table has several models, name one"
            raise PlanError(f"{path}: {asked}; there are: {', '.join(sorted(tables))}")
        model = next(iter(tables))
    times: list[LayerTime] = []
    left_out: list[str] = []
    for setting, layers in tables[model].items():
        kind = kind_named(setting.gpu)
        here = f"{model} on {setting.gpu}, micro-batch {setting.samples}, tensor {setting.tensor}"
        if kind is None:
            left_out.append(f"{here}: the catalogue has no accelerator of this name")
        elif sorted(layers) != list(range(len(layers))) or len(layers) < len(graph.layers):
            left_out.append(f"{here}: has {len(layers)} layers and {graph.name} has {len(graph.layers)}")
        else:
            times.extend(_matched(graph, kind, setting, layers))
    if not times:
        raise PlanError(f"{path}: nothing in it fits {graph.name}: {'; '.join(left_out)}")
    return LayerTimes(tuple(times), tuple(left_out))


def kind_named(gpu: str) -> str | None:
    """The catalogue's name for a GPU that others call `A100-40`, `GH-96` or `RTX-3090`; None if it has none."""
    for short, full in _PREFIXES.items():
        if gpu.startswith(short):
            gpu = full + gpu.removeprefix(short)
    return next((name for name in (gpu, f"{gpu}GB") if name in catalogue()), None)


def _matched(graph: Graph, kind: str, setting: _Setting, layers: Mapping[int, _Seconds]) -> Iterator[LayerTime]:
    last = len(graph.layers) - 1
    for i, layer in enumerate(graph.layers):
        rows = [layers[i]] if i < last else [layers[j] for j in range(last, len(layers))]
        forward, backward, update = (sum(column) for column in zip(*rows, strict=True))
        yield LayerTime(
            layer=layer.name,
            kind=kind,
            samples=float(setting.samples),
            tensor=setting.tensor,
            forward_seconds=forward,
            backward_seconds=backward,
            update_seconds=update,
        )


def _read(path: Path) -> dict[str, dict[_Setting, dict[int, _Seconds]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise PlanError(f"{path}: line 1: no column {', '.join(missing)}; a table of layer times has {', '.join(COLUMNS)}")
            return _tables(path, reader)
    except OSError as error:
        raise PlanError(f"{path}: cannot read the layer times: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not a table of layer times: it is not text") from None


def _tables(path: Path, reader: "csv.DictReader[str]") -> dict[str, dict[_Setting, dict[int, _Seconds]]]:
    tables: dict[str, dict[_Setting, dict[int, _Seconds]]] = defaultdict(lambda: defaultdict(dict))
    for row in reader:
        where = f"{path}: line {reader.line_num}"
        samples, tensor, layer = (_number(row, column, where, whole=True) for column in ("micro_batch", "tp", "layer"))
        if samples < 1 or tensor < 1:
            raise PlanError(f"{where}: micro_batch and tp must be at least 1, got {samples:g} and {tensor:g}")
        setting = _Setting(row["gpu"], int(samples), int(tensor))
        forward, backward, update = (_number(row, column, where) for column in ("fwd_s", "bwd_s", "update_s"))
        layers = tables[row["model"]][setting]
        if int(layer) in layers:
            raise PlanError(f"{where}: layer {int(layer)} of {row['model']} on {row['gpu']} is there twice for this micro-batch and tp")
        layers[int(layer)] = (forward, backward, update)
    if not tables:
        raise PlanError(f"{path}: has no rows")
    return tables


def _number(row: Mapping[str, str | None], column: str, where: str, whole: bool = False) -> float:
    text = row.get(column)
    try:
        value = float(int(text or "")) if whole else float(text or "")
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise PlanError(f"{where}: {column} must be {'a whole number' if whole else 'a number of seconds'}, not below 0, got {text!r}")
    return value
