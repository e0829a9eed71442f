"""Measured layer times (fp32, TF32 where there is such a unit) against what the roofline alone would say of the same layers."""

from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
from layer_times import read_layer_times

from atoll.cluster import Device, DeviceKind
from atoll.cluster.kinds import device_kind
from atoll.cost import Calibration
from atoll.cost.compute import ComputeTimes
from atoll.errors import PlanError
from atoll.graph import Graph, dense_transformer

__all__ = ["compare_layers", "table_graph"]


def table_graph(model: str) -> Graph:
    """The published shape of a model that tables of layer times name."""
    opt = {"sequence": 2048, "vocabulary": 50272, "precision": "fp32"}
    if model == "OPT-350":
        return dense_transformer(name=model, layers=24, hidden=1024, heads=16, **opt)
    if model == "OPT-30":
        return dense_transformer(name=model, layers=48, hidden=7168, heads=56, **opt)
    if model == "GPT-Neo-2.7":
        return dense_transformer(name=model, layers=32, hidden=2560, heads=20, sequence=2048, vocabulary=50257, precision="fp32")
    raise PlanError(f"no shape is known for a model called {model!r}; there are OPT-350, OPT-30 and GPT-Neo-2.7")


def compare_layers(path: Path) -> list[dict[str, object]]:
    """By model and accelerator, whole tensors: mean error of the roofline for a block's forward and backward."""
    lines: list[dict[str, object]] = []
    for model in ("OPT-350", "GPT-Neo-2.7", "OPT-30"):
        graph = table_graph(model)
        block = graph.layers[2]  # the second block: some tables count a warm-up in the first
        ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for measured in read_layer_times(path, graph, model).times:
            if measured.layer != block.name or measured.tensor != 1:
                continue
            kind, calibration = _tensor_units(device_kind(measured.kind))
            device = Device(name="d", kind=kind, host="h", site="s", memory_bytes=kind.memory_bytes)
            table = ComputeTimes(graph, calibration, 28.0).table(device, measured.samples)
            forward, backward = (column[3] - column[2] for column in (table.forward, table.backward))
            ratios[measured.kind].append((forward / measured.forward_seconds, backward / measured.backward_seconds))
        for kind_name, found in ratios.items():
            ratio = np.array(found)
            lines.append(
                {
                    "model": model,
                    "accelerator": kind_name,
                    "micro_batches": len(found),
                    "forward_ratio": float(np.mean(ratio[:, 0])),
                    "backward_ratio": float(np.mean(ratio[:, 1])),
                    "error": float(np.mean(np.abs(ratio - 1))),
                }
            )
    return lines


def _tensor_units(kind: DeviceKind) -> tuple[DeviceKind, Calibration]:
    """The kind with fp32 matmuls on its TF32 units, and constants that still count its units by its fp32 rate."""
    rate = kind.flops.get("tf32")
    if rate is None:
        return kind, Calibration()
    wave = Calibration().wave_outputs * kind.flops["fp32"] / rate
    return msgspec.structs.replace(kind, flops={**kind.flops, "fp32": rate}), Calibration(wave_outputs=wave)
