"""Calibration: the constants of the cost model, each with its physical meaning. Defaults suit a well-kept GPU cluster.

A calibration comes from nowhere (the defaults), from those that ship with Atoll (`named_calibration`), from `atoll probe`, from a run's
report, or from a fit to measured steps. A table of layer times, when given, replaces the roofline for the layers and devices it covers.
"""

import math
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.errors import PlanError

__all__ = ["Calibration", "KindFactor", "LayerTime", "calibration_names", "load_calibration", "meaning", "named_calibration"]


class LayerTime(msgspec.Struct, frozen=True, kw_only=True):
    """A measured layer: seconds for one micro-batch of `samples` on a device of `kind`.

    With `tensor` above 1 it was timed on a group that splits its tensors that many ways, their all-reduces included.
    """

    layer: str  # a layer's name or signature
    kind: str
    samples: Annotated[float, Meta(gt=0)]
    tensor: Annotated[int, Meta(ge=1)] = 1
    forward_seconds: Annotated[float, Meta(ge=0)]
    backward_seconds: Annotated[float, Meta(ge=0)]
    update_seconds: Annotated[float, Meta(ge=0)] = 0.0


class KindFactor(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer than the roofline, or than its probe, a kind of device was measured to take over layers no `LayerTime` covers."""

    kind: str
    forward: Annotated[float, Meta(gt=0)]
    backward: Annotated[float, Meta(gt=0)]
    update: Annotated[float, Meta(gt=0)] = 1.0


_Share = Annotated[float, Meta(gt=0, le=1.5)]
_Amount = Annotated[float, Meta(ge=0)]


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the cost model. Shares are of the catalogue's peak figures. `meaning` gives a field's text."""

    matmul_efficiency: Annotated[_Share, Meta(description="share of peak FLOP/s that a large matmul reaches")] = 0.80
    matmul_half_depth: Annotated[_Amount, Meta(description="inner dimension at which half of that is reached: a tile fills and drains")] = (
        64.0
    )
    wave_outputs: Annotated[
        _Amount, Meta(description="outputs, per fp32 FLOP/s of the device, at which a matmul reaches half: a tile for every unit")
    ] = 5e-8  # half a wave of 128 × 128 tiles on most accelerators
    memory_efficiency: Annotated[_Share, Meta(description="share of memory bandwidth that an elementwise kernel reaches")] = 0.80
    kernel_seconds: Annotated[_Amount, Meta(description="what a kernel costs beyond its work: launch and tail")] = 3e-6
    host_link_efficiency: Annotated[_Share, Meta(description="share of the link inside a host that a collective reaches")] = 0.75
    network_efficiency: Annotated[_Share, Meta(description="share of a host's network interface or of a link between sites")] = 0.80
    collective_seconds: Annotated[_Amount, Meta(description="what a collective costs beyond its bytes and hops: entering together")] = 15e-6
    sync_overlap: Annotated[float, Meta(ge=0, le=1, description="part of a backward pass that can hide gradient synchronisation")] = 0.8
    shard_kernels: Annotated[
        _Amount, Meta(description="kernels that pack or unpack a layer's shards for one exchange, in turn with the layer's own")
    ] = 4.0
    cpu_shard_seconds: Annotated[
        _Amount, Meta(description="what one exchange of a layer's shards costs processors, which do all of it themselves")
    ] = 3e-3  # FSDP2 over Gloo, two processes: 3–4 ms a layer beyond its bytes, and nothing is hidden behind compute
    step_seconds: Annotated[_Amount, Meta(description="per step, outside the model: data, logging, the optimizer's Python")] = 0.0
    straggler_seconds: Annotated[
        _Amount, Meta(description="per step and doubling of the hosts: all agree on norm and loss scale and wait for the slowest")
    ] = 0.0
    jitter: Annotated[_Amount, Meta(description="relative slow-down for each doubling of the devices that wait for one another")] = 0.0
    gradient_bytes: Annotated[float, Meta(gt=0, description="of one parameter's gradient when it is synchronised")] = 4.0
    context_bytes: Annotated[_Amount, Meta(description="memory an accelerator's runtime takes for itself")] = 0.8e9
    memory_overhead: Annotated[float, Meta(ge=1, description="allocator's fragments and workspaces, as a factor on what is counted")] = 1.08
    layer_times: tuple[LayerTime, ...] = ()
    kind_factors: Annotated[
        tuple[KindFactor, ...], Meta(description="by kind of device: measured over predicted, for layers that have no measured time")
    ] = ()
    source: str = "defaults"

    def shard_seconds(self, *, is_cpu: bool) -> float:
        """What one exchange of one layer's shards costs beyond its bytes."""
        return self.cpu_shard_seconds if is_cpu else self.shard_kernels * self.kernel_seconds

    def to_json(self) -> str:
        """As JSON; `load_calibration` reads it back."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


def meaning(constant: str) -> str:
    """What a constant of `Calibration` stands for."""
    described = msgspec.inspect.type_info(Calibration)
    assert isinstance(described, msgspec.inspect.StructType)
    for field in described.fields:
        if field.name == constant and isinstance(field.type, msgspec.inspect.Metadata):
            return str((field.type.extra_json_schema or {}).get("description", ""))
    return ""


def load_calibration(path: "str | Path") -> Calibration:
    """Reads what `Calibration.to_json` wrote, or the same keys in a `.toml` file; PlanError names the file and the key."""
    try:
        return _decode(Path(path).read_bytes(), is_toml=Path(path).suffix == ".toml", where=str(path))
    except OSError as error:
        raise PlanError(f"{path}: cannot read the calibration: {error.strerror}") from None


def named_calibration(name: str) -> Calibration:
    """A calibration that ships with Atoll; PlanError lists them when there is none of that name."""
    if name == "defaults":
        return Calibration()
    if name not in calibration_names():
        raise PlanError(f"no calibration is called {name!r}; there are: {', '.join(calibration_names())}")
    document = files("atoll.cost").joinpath("calibrations", f"{name}.toml").read_bytes()
    return _decode(document, is_toml=True, where=f"{name}.toml")


def calibration_names() -> tuple[str, ...]:
    """The calibrations that ship with Atoll, for `named_calibration`."""
    entries = files("atoll.cost").joinpath("calibrations").iterdir()
    return ("defaults", *sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml")))


def _decode(document: bytes, *, is_toml: bool, where: str) -> Calibration:
    try:
        if is_toml:
            values = tomllib.loads(document.decode())
            _check_finite(values, "")
            return msgspec.convert(values, type=Calibration)
        return msgspec.json.decode(document, type=Calibration)
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{where}: not a calibration: {error}") from None


def _check_finite(value: object, where: str) -> None:
    """TOML, unlike JSON, can write `inf` and `nan`, which pass or evade bounds."""
    if isinstance(value, float) and not math.isfinite(value):
        raise msgspec.ValidationError(f"{where} must be a finite number, got {value}")
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        _check_finite(entry, f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}".lstrip("."))
