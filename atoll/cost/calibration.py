"""Calibration: the constants of the cost model, each with its physical meaning. Defaults suit a well-kept GPU cluster.

A calibration comes from nowhere (the defaults), from `atoll probe`, from a run's report, or from a fit to measured steps. A table of layer
times, when given, replaces the roofline for the layers and devices it covers.
"""

from pathlib import Path

import msgspec

from atoll.errors import PlanError

__all__ = ["Calibration", "LayerTime", "load_calibration"]


class LayerTime(msgspec.Struct, frozen=True, kw_only=True):
    """A measured layer: seconds for one micro-batch of `samples` on a device of `kind`.

    With `tensor` above 1 it was timed on a group that splits its tensors that many ways, their all-reduces included.
    """

    layer: str  # a layer's name or signature
    kind: str
    samples: float
    tensor: int = 1
    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of the cost model. Fractions are of the catalogue's peak figures."""

    matmul_efficiency: float = 0.80  # of peak FLOP/s that a large matmul reaches
    matmul_half_depth: float = 96.0  # an inner dimension this long reaches half of that: filling and draining a tile
    wave_outputs: float = 1e-7  # outputs, per fp32 FLOP/s of the device, with which a matmul reaches half: tiles for every unit
    memory_efficiency: float = 0.80  # of memory bandwidth that an elementwise kernel reaches
    kernel_seconds: float = 3e-6  # what a kernel costs beyond its work: launch and tail
    host_link_efficiency: float = 0.75  # of the link inside a host that a collective reaches
    network_efficiency: float = 0.80  # of a host's network interface or a link between sites
    collective_seconds: float = 15e-6  # what a collective costs beyond its bytes and hops: entering together
    sync_overlap: float = 0.8  # part of the backward pass that can hide gradient synchronisation
    step_seconds: float = 0.0  # per step, outside the model: data, logging, the optimizer's Python
    jitter: float = 0.0  # relative slow-down for each doubling of the devices that wait for one another
    gradient_bytes: float = 4.0  # of one parameter's gradient when it is synchronised
    context_bytes: float = 0.8e9  # memory an accelerator's runtime takes for itself
    memory_overhead: float = 1.08  # allocator fragmentation and workspaces, on top of what is counted
    layer_times: tuple[LayerTime, ...] = ()
    source: str = "defaults"

    def to_json(self) -> str:
        """As JSON; `load_calibration` reads it back."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


def load_calibration(path: "str | Path") -> Calibration:
    """Reads what `Calibration.to_json` wrote; PlanError names the file and the key."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except OSError as error:
        raise PlanError(f"{path}: cannot read the calibration: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise PlanError(f"{path}: not a calibration: {error}") from None
