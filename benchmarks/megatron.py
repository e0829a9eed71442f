"""Measured steps of Megatron-style GPT training, read from a table, each as the Graph, Cluster and Plan that describe it.

Columns: num_gpus, global_batch, micro_batch, hidden_size, heads, layers, seq_len, tp, dp, pp, iter_ms, and optionally params_b.
Assumed of every run: fp16, vocabulary 51,200, blocks divided equally over the stages, 1F1B, every block recomputed, unfused
attention with dropout, Adam; hosts of 8 A100-80GB on NVLink with 4 × 200 Gbit/s InfiniBand, filled by tensor ranks first, then data
ranks, then stages.
"""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Calibration, Evaluator
from atoll.errors import PlanError
from atoll.graph import Graph, dense_transformer
from atoll.plan import Plan, Replica, Stage

__all__ = ["ASSUMED", "Row", "Run", "read_runs"]

ASSUMED = (
    "fp16, vocabulary 51,200, every block recomputed, 1F1B, Adam; hosts of 8 A100-80GB with 800 Gbit/s InfiniBand; "
    "tensor ranks innermost, then data ranks, then stages"
)
COLUMNS = ("num_gpus", "global_batch", "micro_batch", "hidden_size", "heads", "layers", "seq_len", "tp", "dp", "pp")
DEVICES_PER_HOST = 8
VOCABULARY = 51_200


class Row(NamedTuple):
    """One measured run."""

    line: int
    billions: float  # of parameters
    num_gpus: int
    global_batch: int
    micro_batch: int
    hidden_size: int
    heads: int
    layers: int
    seq_len: int
    tp: int
    dp: int
    pp: int
    seconds: float  # measured


class Run(NamedTuple):
    """A row and the nouns that describe it."""

    row: Row
    graph: Graph
    cluster: Cluster
    plan: Plan

    def predict(self, calibration: Calibration) -> float:
        """Seconds of a step."""
        return Evaluator(self.graph, self.cluster, optimizer="adam", calibration=calibration).seconds(self.plan)


def read_runs(path: Path) -> list[Run]:
    """Every row of the table; PlanError names the line that is wrong."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in (*COLUMNS, "iter_ms") if name not in (reader.fieldnames or ())]
            if missing:
                raise PlanError(f"{path}: line 1: no column {', '.join(missing)}")
            runs = [_run(_row(values, reader.line_num, f"{path}: line {reader.line_num}")) for values in reader]
    except OSError as error:
        raise PlanError(f"{path}: cannot read the rows: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not a table: it is not text") from None
    if not runs:
        raise PlanError(f"{path}: has no rows")
    return runs


def _row(values: Mapping[str, str | None], line: int, where: str) -> Row:
    whole = {name: _positive(values, name, where, whole=True) for name in COLUMNS}
    counts = {name: int(value) for name, value in whole.items()}
    tp, dp, pp = counts["tp"], counts["dp"], counts["pp"]
    if tp * dp * pp != counts["num_gpus"]:
        raise PlanError(f"{where}: tp × dp × pp is {tp * dp * pp}, but num_gpus is {counts['num_gpus']}")
    if counts["global_batch"] % (dp * counts["micro_batch"]):
        raise PlanError(
            f"{where}: global_batch {counts['global_batch']} is not a multiple of dp × micro_batch, {dp * counts['micro_batch']}"
        )
    if counts["layers"] % pp or counts["hidden_size"] % counts["heads"]:
        raise PlanError(f"{where}: layers must be a multiple of pp, and hidden_size of heads")
    billions = _positive(values, "params_b", where) if values.get("params_b") else _billions(counts)
    return Row(line=line, billions=billions, seconds=_positive(values, "iter_ms", where) / 1e3, **counts)


def _billions(counts: Mapping[str, int]) -> float:
    hidden = counts["hidden_size"]
    return round((12 * counts["layers"] * hidden**2 + (VOCABULARY + counts["seq_len"]) * hidden) / 1e9, 2)


def _positive(values: Mapping[str, str | None], name: str, where: str, whole: bool = False) -> float:
    text = values.get(name)
    try:
        value = float(int(text or "")) if whole else float(text or "")
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise PlanError(f"{where}: {name} must be a {'whole ' if whole else ''}number above 0, got {text!r}")
    return value


def _run(row: Row) -> Run:
    graph, cluster = _graph(row.layers, row.hidden_size, row.heads, row.seq_len), _cluster(row.num_gpus)
    return Run(row, graph, cluster, _plan(row, graph, cluster))


@cache
def _graph(layers: int, hidden: int, heads: int, sequence: int) -> Graph:
    name = f"gpt-{layers}x{hidden}"
    return dense_transformer(name=name, layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=VOCABULARY)


@cache
def _cluster(devices: int) -> Cluster:
    full = devices % DEVICES_PER_HOST == 0
    hosts, each = (devices // DEVICES_PER_HOST, DEVICES_PER_HOST) if full else (1, devices)
    site = make_site("site", kind="A100-80GB", hosts=hosts, devices=each, network="800 Gbit/s", latency="5 us")
    return make_cluster(f"{devices} A100", [site])


def _plan(row: Row, graph: Graph, cluster: Cluster) -> Plan:
    names = [device.name for device in cluster.devices]
    blocks = row.layers // row.pp
    share = (row.global_batch // row.dp,)
    stages = []
    for s in range(row.pp):
        first = s * row.dp
        replicas = tuple(
            Replica(devices=tuple(names[(first + d) * row.tp : (first + d + 1) * row.tp]), samples=share) for d in range(row.dp)
        )
        start = 1 + s * blocks if s else 0  # the embedding belongs to the first stage, the head to the last
        stop = 1 + (s + 1) * blocks if s + 1 < row.pp else len(graph.layers)
        stages.append(Stage(start=start, stop=stop, replicas=replicas, tensor=row.tp, recompute=True))
    return Plan(graph=graph.name, cluster=cluster.name, batch_size=row.global_batch, micro_batch_size=row.micro_batch, stages=tuple(stages))
