"""Predicted against measured steps of GPT training on A100 clusters, and how little it costs to choose by the prediction.

    python benchmarks/prediction.py --rows FILE.csv [--json] [--no-refit] [--save CALIBRATION.json]
                                    [--layer-times FILE.csv] [--all-reduces FILE.csv]

For every row a Graph, a Cluster and a Plan are made and priced by the ordinary `Evaluator`, first with the constants that ship with Atoll
(`a100-megatron`), then with constants refitted to the given rows; then each model size, and each fold of rows, is predicted by constants
fitted without it. Regret: of the rows of one model, device count and batch, the measured time of the one with the least predicted time
against the best measured. Limits (issue 2): mean error 7%, 14% for a size left out, regret 3%. `--layer-times` and `--all-reduces`
report how the roofline and the model of collectives agree with measured layers and NCCL all-reduces.
"""

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from all_reduces import compare_all_reduces
from fitting import FITTED, Array, Fitting, mean_error, predict, regret
from layer_roofline import compare_layers
from megatron import ASSUMED, Run, read_runs
from report import print_json, print_table

from atoll.cost import Calibration, Evaluator, meaning, named_calibration
from atoll.errors import AtollError

SHIPPED = "a100-megatron"
LIMITS = {"error": 0.07, "size_left_out": 0.14, "regret": 0.03}
FOLDS = 5
STRAY = 0.25
MOST_ROWS_FITTED = 150  # of a longer file, a seeded sample is refitted


def _parts(runs: Sequence[Run]) -> tuple[dict[float, list[int]], list[list[int]]]:
    """Rows by model size, and in folds."""
    sizes: dict[float, list[int]] = {}
    for i, run in enumerate(runs):
        sizes.setdefault(run.row.billions, []).append(i)
    order = list(range(len(runs)))
    random.Random(0).shuffle(order)
    return sizes, [part for part in (order[i::FOLDS] for i in range(FOLDS)) if part and len(part) < len(runs)]


def _summary(runs: Sequence[Run], predicted: Array) -> dict[str, object]:
    chosen = regret(runs, predicted)
    errors = np.abs(predicted / np.array([run.row.seconds for run in runs]) - 1)
    return {
        "error": mean_error(runs, predicted),
        "median_error": float(np.median(errors)),
        "worst_error": float(np.max(errors)),
        "regret": float(np.mean(list(chosen.values()))) if chosen else 0.0,
        "regret_by_choice": chosen,
    }


def _refitted(runs: list[Run], shipped: Calibration) -> tuple[Calibration, dict[str, dict[str, object]], dict[str, float]]:
    """Constants fitted to these rows; summaries of the fit, of sizes left out and of folds; the error of each size left out."""
    fitting = Fitting(runs, shipped)
    calibration = fitting.fit(range(len(runs)))
    summaries = {"refitted": _summary(runs, predict(runs, calibration))}
    sizes, folds = _parts(runs)
    by_size: dict[str, float] = {}
    if len(sizes) > 1:
        predicted = fitting.left_out(list(sizes.values()))
        summaries["size_left_out"] = _summary(runs, predicted)
        by_size = {f"{size}B": mean_error([runs[i] for i in part], predicted[part]) for size, part in sorted(sizes.items())}
    if folds:
        summaries[f"{FOLDS}_folds"] = _summary(runs, fitting.left_out(folds))
    return calibration, summaries, by_size


def _rows(runs: Sequence[Run], shipped: Array, refitted: Array | None) -> list[dict[str, object]]:
    rows = []
    for i, run in enumerate(runs):
        row = run.row._asdict()
        row |= {"predicted": float(shipped[i]), "error": float(shipped[i] / run.row.seconds - 1)}
        if refitted is not None:
            row |= {"refitted": float(refitted[i]), "refitted_error": float(refitted[i] / run.row.seconds - 1)}
        rows.append(row)
    return rows


def _constants(shipped: Calibration, refitted: Calibration | None) -> list[dict[str, object]]:
    listed: list[dict[str, object]] = []
    for constant in FITTED:
        entry: dict[str, object] = {"name": constant.name, "shipped": getattr(shipped, constant.name)}
        if refitted is not None:
            entry["refitted"] = getattr(refitted, constant.name)
        listed.append({**entry, "expected": constant.expected, "meaning": meaning(constant.name)})
    return listed


def _strays(runs: Sequence[Run], predicted: Array, calibration: Calibration) -> list[dict[str, object]]:
    """Rows that are off by more than a quarter, with the memory their fullest device would use: near 1, the allocator may be at fault."""
    found: list[dict[str, object]] = []
    for run, seconds in zip(runs, predicted, strict=True):
        if abs(seconds / run.row.seconds - 1) > STRAY:
            memory = Evaluator(run.graph, run.cluster, optimizer="adam", calibration=calibration).memory(run.plan)
            fullest = max(use.total_bytes / run.cluster.device(name).kind.memory_bytes for name, use in memory.items())
            found.append({"line": run.row.line, "measured_over_predicted": run.row.seconds / float(seconds), "memory_used": fullest})
    return found


def benchmark(path: Path, refit: bool, save: Path | None) -> dict[str, object]:
    """Everything about one file of rows."""
    began = time.perf_counter()
    runs = read_runs(path)
    shipped = named_calibration(SHIPPED)
    with_shipped = predict(runs, shipped)
    summaries = {"shipped": _summary(runs, with_shipped)}
    calibration, by_size, refitted = None, {}, None
    if refit:
        sample = runs if len(runs) <= MOST_ROWS_FITTED else random.Random(0).sample(runs, MOST_ROWS_FITTED)
        calibration, fits, by_size = _refitted(sample, shipped)
        summaries |= fits
        refitted = predict(runs, calibration)
        summaries["refitted"] = _summary(runs, refitted)
    if save is not None:
        chosen = msgspec.structs.replace(calibration, source=f"fitted to {path.name}") if calibration else shipped
        save.write_text(chosen.to_json(), encoding="utf-8")
    return {
        "file": path.name,
        "assumed": ASSUMED,
        "fitted_constants": len(FITTED),
        "limits": LIMITS,
        **summaries,
        "error_by_size_left_out": by_size,
        "constants": _constants(shipped, calibration),
        "not_fitted": {"sync_overlap": shipped.sync_overlap, "gradient_bytes": shipped.gradient_bytes},
        "strays": _strays(runs, with_shipped, shipped),
        "rows": _rows(runs, with_shipped, refitted),
        "seconds": time.perf_counter() - began,
    }


def _print(result: Mapping[str, object]) -> None:
    rows = result["rows"]
    assert isinstance(rows, list)
    shown = ("line", "billions", "num_gpus", "micro_batch", "tp", "dp", "pp")
    head = [*shown, "measured s", "predicted s", "error %", *(["refitted %"] if "refitted" in rows[0] else [])]
    body = []
    for row in rows:
        errors = [row[key] for key in ("error", "refitted_error") if key in row]
        body.append([*(row[key] for key in shown), row["seconds"], row["predicted"], *(round(100 * error, 1) for error in errors)])
    print_table(f"{result['file']}: measured and predicted steps ({result['assumed']})", head, body)
    constants = result["constants"]
    assert isinstance(constants, list)
    print_table(f"{len(constants)} fitted constants", list(constants[0]), [list(entry.values()) for entry in constants])
    lines = []
    for name, summary in result.items():
        if isinstance(summary, dict) and "median_error" in summary:
            lines.append([name, *(round(100 * summary[key], 2) for key in ("error", "median_error", "worst_error", "regret"))])
    print_table("errors in percent", ["constants", "mean", "median", "worst", "regret"], lines)
    strays = result["strays"]
    assert isinstance(strays, list)
    if strays:
        print_table(f"rows off by more than {STRAY:.0%}", list(strays[0]), [list(entry.values()) for entry in strays])
    by_size = result["error_by_size_left_out"]
    assert isinstance(by_size, dict)
    if not by_size:
        return
    print_table("mean error of each size left out, percent", ["size", "error"], [[size, round(100 * e, 1)] for size, e in by_size.items()])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="measured steps")
    parser.add_argument("--layer-times", type=Path, help="measured layers, to compare the roofline with")
    parser.add_argument("--all-reduces", type=Path, help="measured all-reduces inside a host")
    parser.add_argument("--no-refit", action="store_true", help="only the constants that ship")
    parser.add_argument("--save", type=Path, help="write the refitted constants here")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if not (options.rows or options.layer_times or options.all_reduces):
        parser.error("give --rows, --layer-times or --all-reduces")
    result: dict[str, object] = {}
    try:
        if options.rows:
            result = benchmark(options.rows, not options.no_refit, options.save)
        if options.layer_times:
            result["layer_times"] = compare_layers(options.layer_times)
        if options.all_reduces:
            result["all_reduces"] = compare_all_reduces(options.all_reduces, named_calibration(SHIPPED))
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print_json(result)
        return 0
    if options.rows:
        _print(result)
    for key, title in (("layer_times", "measured layers against the roofline"), ("all_reduces", "NCCL all-reduces, predicted")):
        table = result.get(key)
        if isinstance(table, list):
            print_table(title, list(table[0]), [list(line.values()) for line in table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
