"""Kinds of device: reading one from a table, and the catalogue of those everybody knows."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from atoll.cluster.cluster import (
    AttentionRate,
    ConvRate,
    DeviceKind,
    MatmulRate,
    Measurements,
    MemoryRate,
    OperatorRate,
    UpdateTime,
)
from atoll.cluster.reader import BANDWIDTH, BYTES, FLOPS, LATENCY, MEMORY, Table, nearest
from atoll.errors import ClusterError

__all__ = ["PRECISIONS", "catalogue", "device_kind", "find_kind", "read_kind"]

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
KIND_KEYS = ("name", "memory", "memory_bandwidth", "flops", "link", "source", "cpu", "measured")
ATTENTION_VARIANTS = ("", "causal", "dropout")
_LARGEST_SIDE = 10**9  # of a measured operator


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
    keys = ("threads", "operator", "matmul", "conv", "memory", "operators", "attention", "updates")
    table = kind.table("measured", keys, "{ … }")

    def rows(key: str) -> list[tuple[object, str]]:
        return [(values, f"{table.where} › {key}[{i}]") for i, values in enumerate(table.entries(key))]

    return Measurements(
        operator_seconds=table.quantity("operator", LATENCY),
        matmul=tuple(_matmul(values, where) for values, where in rows("matmul")),
        conv=tuple(_conv(values, where) for values, where in rows("conv")),
        memory=tuple(_memory(values, where) for values, where in rows("memory")),
        operators=tuple(_operator(values, where) for values, where in rows("operators")),
        attention=tuple(_attention(values, where) for values, where in rows("attention")),
        updates=tuple(_update(values, where) for values, where in rows("updates")),
        threads=table.integer("threads", 0, 10_000, 0),
    )


def _precision(table: Table) -> str:
    precision = table.text("precision", "fp32")
    if precision not in PRECISIONS:
        raise table.wrong("precision", f"unknown precision {precision!r}{nearest(precision, PRECISIONS)}")
    return precision


def _matmul(values: object, where: str) -> MatmulRate:
    table = Table(values, where, ("precision", "rows", "columns", "depth", "rate"))
    rows, columns, depth = (table.integer(key, 1, _LARGEST_SIDE) for key in ("rows", "columns", "depth"))
    return MatmulRate(precision=_precision(table), rows=rows, columns=columns, depth=depth, flops_per_s=table.quantity("rate", FLOPS))


def _conv(values: object, where: str) -> ConvRate:
    sides = ("batch", "inputs", "outputs", "size", "kernel")
    table = Table(values, where, ("precision", *sides, "groups", "rate", "backward"))
    batch, inputs, outputs, size, kernel = (table.integer(key, 1, _LARGEST_SIDE) for key in sides)
    return ConvRate(
        precision=_precision(table),
        batch=batch,
        inputs=inputs,
        outputs=outputs,
        size=size,
        kernel=kernel,
        groups=table.integer("groups", 1, _LARGEST_SIDE, 1),
        flops_per_s=table.quantity("rate", FLOPS),
        backward_flops_per_s=table.quantity("backward", FLOPS, 0.0),
    )


def _memory(values: object, where: str) -> MemoryRate:
    table = Table(values, where, ("size", "rate"))
    return MemoryRate(bytes=table.quantity("size", BYTES), bytes_per_s=table.quantity("rate", BANDWIDTH))


def _operator(values: object, where: str) -> OperatorRate:
    table = Table(values, where, ("name", "size", "rate", "backward"))
    return OperatorRate(
        operator=table.text("name", "gelu"),
        bytes=table.quantity("size", BYTES),
        bytes_per_s=table.quantity("rate", BANDWIDTH),
        backward_bytes_per_s=table.quantity("backward", BANDWIDTH),
    )


def _attention(values: object, where: str) -> AttentionRate:
    sides = ("heads", "sequence", "depth")
    table = Table(values, where, ("variant", *sides, "rate", "backward"))
    variant = table.text("variant", "causal", "")
    if variant not in ATTENTION_VARIANTS:
        raise table.wrong("variant", f"must be one of {', '.join(map(repr, ATTENTION_VARIANTS))}, got {variant!r}")
    heads, sequence, depth = (table.integer(key, 1, _LARGEST_SIDE) for key in sides)
    return AttentionRate(
        variant=variant,
        heads=heads,
        sequence=sequence,
        depth=depth,
        flops_per_s=table.quantity("rate", FLOPS),
        backward_flops_per_s=table.quantity("backward", FLOPS),
    )


def _update(values: object, where: str) -> UpdateTime:
    table = Table(values, where, ("optimizer", "elements", "time"))
    elements = table.integer("elements", 1, _LARGEST_SIDE)
    return UpdateTime(optimizer=table.text("optimizer", "adamw"), elements=elements, seconds=table.quantity("time", LATENCY))
