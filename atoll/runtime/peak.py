"""How much memory a run has needed so far."""

import sys

import torch

__all__ = ["peak_memory_bytes"]


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most used so far: on the accelerator, or by this process where it computes on the CPU; None where nobody can tell."""
    if device.type not in ("cpu", "mps"):
        return int(torch.accelerator.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
