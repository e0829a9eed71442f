"""NCCL all-reduces inside one host, measured, against the model of collectives."""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Calibration
from atoll.cost.communication import all_reduce_seconds, span_of
from atoll.errors import PlanError

__all__ = ["compare_all_reduces"]

KINDS = {"a100": "A100-80GB", "v100": "V100-16GB"}
COLUMNS = ("gpu", "num_gpus", "bytes", "time_us_oop")


def compare_all_reduces(path: Path, calibration: Calibration) -> list[dict[str, object]]:
    """By accelerator and number of them: mean predicted/measured and mean error, with these constants and with the defaults."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
                raise PlanError(f"{path}: line 1: no column {', '.join(missing)}")
            for row in reader:
                try:
                    found[row["gpu"], int(row["num_gpus"])].append((float(row["bytes"]), float(row["time_us_oop"]) * 1e-6))
                except (ValueError, TypeError):
                    raise PlanError(f"{path}: line {reader.line_num}: num_gpus, bytes and time_us_oop must be numbers") from None
    except OSError as error:
        raise PlanError(f"{path}: cannot read the all-reduces: {error.strerror}") from None
    return [_compared(gpu, count, points, calibration) for (gpu, count), points in sorted(found.items())]


def _compared(gpu: str, count: int, points: list[tuple[float, float]], calibration: Calibration) -> dict[str, object]:
    if gpu not in KINDS:
        raise PlanError(f"all-reduces of an unknown accelerator {gpu!r}; known are {', '.join(KINDS)}")
    cluster = make_cluster("one host", [make_site("site", kind=KINDS[gpu], devices=count)])
    ratio, plain = (np.array([_predicted(cluster, nbytes, c) / s for nbytes, s in points]) for c in (calibration, Calibration()))
    return {
        "accelerator": KINDS[gpu],
        "devices": count,
        "sizes": len(points),
        "ratio": float(np.mean(ratio)),
        "error": float(np.mean(np.abs(ratio - 1))),
        "ratio_defaults": float(np.mean(plain)),
        "error_defaults": float(np.mean(np.abs(plain - 1))),
    }


def _predicted(cluster: Cluster, nbytes: float, calibration: Calibration) -> float:
    return all_reduce_seconds(span_of(cluster, [cluster.devices], calibration), nbytes, calibration)
