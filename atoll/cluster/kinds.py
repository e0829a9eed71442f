"""Kinds of device: reading one from a table, and the catalogue of those everybody knows."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import msgspec

from atoll.cluster.cluster import AttentionRate, ConvRate, DeviceKind, MatmulRate, Measurements, MemoryRate, OperatorRate, UpdateTime
from atoll.cluster.reader import BANDWIDTH, BYTES, FLOPS, LATENCY, MEMORY, MEMORY_BANDWIDTH, Quantity, Table, nearest
from atoll.errors import ClusterError

__all__ = ["ATTENTION_VARIANTS", "PRECISIONS", "RATES", "catalogue", "device_kind", "find_kind", "read_kind"]

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
KIND_KEYS = ("name", "memory", "memory_bandwidth", "flops", "link", "source", "cpu", "measured")
ATTENTION_VARIANTS = ("", "causal", "dropout")
_LARGEST_SIDE = 10**9  # of a measured operator

# The rate's field, and what stands in the file: a quantity, one of several words, some text (an example of it), or None: a whole number.
Column = tuple[str, Quantity | Sequence[str] | str | None]


def _sides(*names: str) -> dict[str, Column]:
    return {name: (name, None) for name in names}


RATES: Mapping[str, tuple[type[msgspec.Struct], Mapping[str, Column]]] = {
    "matmul": (
        MatmulRate,
        {"precision": ("precision", PRECISIONS), **_sides("rows", "columns", "depth"), "rate": ("flops_per_s", FLOPS)},
    ),
    "conv": (
        ConvRate,
        {
            "precision": ("precision", PRECISIONS),
            **_sides("batch", "inputs", "outputs", "size", "kernel", "groups"),
            "rate": ("flops_per_s", FLOPS),
            "backward": ("backward_flops_per_s", FLOPS),
        },
    ),
    "memory": (MemoryRate, {"size": ("bytes", BYTES), "rate": ("bytes_per_s", MEMORY_BANDWIDTH)}),
    "operators": (
        OperatorRate,
        {
            "name": ("operator", "gelu"),
            "size": ("bytes", BYTES),
            "rate": ("bytes_per_s", MEMORY_BANDWIDTH),
            "backward": ("backward_bytes_per_s", MEMORY_BANDWIDTH),
        },
    ),
    "attention": (
        AttentionRate,
        {
            "variant": ("variant", ATTENTION_VARIANTS),
            **_sides("heads", "sequence", "depth"),
            "rate": ("flops_per_s", FLOPS),
            "backward": ("backward_flops_per_s", FLOPS),
        },
    ),
    "updates": (UpdateTime, {"optimizer": ("optimizer", "adamw"), **_sides("elements"), "time": ("seconds", LATENCY)}),
}
"""The tables of measurements in a cluster file: of what rates, and their columns in the order they are written."""


@cache
def catalogue() -> Mapping[str, DeviceKind]:
    """Every known kind of device by name."""
    where = "catalogue.toml"
    document = tomllib.loads(files("atoll.cluster").joinpath("catalogue.toml").read_text("utf-8"))
    kinds: dict[str, DeviceKind] = {}
    for values in Table(document, where, ("device_kind",)).entries("device_kind"):
        kind = read_kind(values, f"{where}: device_kind {values.get('name')!r}" if isinstance(values, dict) else where)
        if kind.name in kinds:
            raise ClusterError(f"{where}: device_kind {kind.name!r} is there twice")
        kinds[kind.name] = kind
    return MappingProxyType(kinds)


def find_kind(name: str, kinds: Mapping[str, DeviceKind], where: str) -> DeviceKind:
    """The kind of that name among a file's own and the catalogue's."""
    kind = kinds.get(name) or catalogue().get(name)
    if kind is None:
        hint = nearest(name, [*kinds, *catalogue()]) or "; describe it in a [[device_kind]] table"
        raise ClusterError(f"{where}: unknown accelerator {name!r}{hint}")
    return kind


def device_kind(name: str) -> DeviceKind:
    """The kind of that name from the catalogue; an error names the nearest one."""
    return find_kind(name, {}, "device kind")


def read_kind(values: object, where: str) -> DeviceKind:
    """A kind of device from its table."""
    table = Table(values, where, KIND_KEYS)
    link = table.table("link", ("bandwidth", "latency"), "{ … }") if "link" in table else None
    return DeviceKind(
        name=table.text("name", "X"),
        memory_bytes=table.quantity("memory", MEMORY),
        flops=_flops(table.table("flops", PRECISIONS, '{ fp32 = "20 TFLOPS" }')),
        memory_bytes_per_s=table.quantity("memory_bandwidth", BANDWIDTH),
        link_bytes_per_s=link.quantity("bandwidth", BANDWIDTH) if link else 0.0,
        link_latency_s=link.quantity("latency", LATENCY, 5e-6) if link else 5e-6,
        source=table.text("source", "a datasheet", ""),
        cpu=table.truth("cpu", False),
        measured=_measured(table) if "measured" in table else None,
    )


def _flops(table: Table) -> dict[str, float]:
    rates = {precision: table.quantity(precision, FLOPS) for precision, _ in table.items()}
    if "fp32" not in rates:
        raise table.wrong("fp32", "missing; every device needs its fp32 rate, other precisions are optional")
    return rates


def _measured(kind: Table) -> Measurements:
    table = kind.table("measured", ("threads", "operator", *RATES), "{ … }")

    measured = {}
    for key, (rate, columns) in RATES.items():
        rows = enumerate(table.entries(key))
        measured[key] = tuple(_row(values, f"{table.where} › {key}[{i}]", rate, columns) for i, values in rows)
    return Measurements(operator_seconds=table.quantity("operator", LATENCY), threads=table.integer("threads", 0, 10_000, 0), **measured)


def _row(values: object, where: str, rate: type[msgspec.Struct], columns: Mapping[str, Column]) -> Any:
    table = Table(values, where, columns)
    defaults = {field.name: field.default for field in msgspec.structs.fields(rate) if field.default is not msgspec.NODEFAULT}
    return rate(**{field: _value(table, key, kind, defaults.get(field)) for key, (field, kind) in columns.items()})


def _value(table: Table, key: str, kind: Quantity | Sequence[str] | str | None, default: Any) -> object:
    if isinstance(kind, Quantity):
        return table.quantity(key, kind, default)
    if kind is None:
        return table.integer(key, 1, _LARGEST_SIDE, default)
    if isinstance(kind, str):
        return table.text(key, kind)
    value = table.text(key, kind[1], "" if "" in kind else None)
    if value not in kind:
        hint = nearest(value, kind) or f"; there are {', '.join(map(repr, kind))}"
        raise table.wrong(key, f"unknown {key} {value!r}{hint}")
    return value
