"""Whether a captured program can be run as a plan lays it out: what the plan's own rules cannot see.

Pure: every rank comes to the same answer.
"""

from atoll.errors import PlanError
from atoll.graph.capture import Captured
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.stage.program import cut_stage
from atoll.runtime.stage.sizes import Sizes

__all__ = ["check_lane_sizes"]


def check_lane_sizes(layout: Layout, captured: Captured, sizes: Sizes) -> None:
    """Raise a `PlanError` for micro-batches the program cannot compute, or values that lanes would have to divide and cannot."""
    _check_samples(layout, captured, sizes)
    for stage in range(1, len(layout.plan.stages)):
        if any(layout.pieces(stage - 1, m) != layout.pieces(stage, m) for m in range(len(layout.micro_batches))):
            _check_crossing(layout, captured, sizes, stage)


def _check_samples(layout: Layout, captured: Captured, sizes: Sizes) -> None:
    """Some models can be captured for one number of samples only."""
    if sizes.fixed is None:
        return
    for stage in range(len(layout.plan.stages)):
        for m in range(len(layout.micro_batches)):
            for start, stop in layout.pieces(stage, m):
                if stop - start != sizes.fixed:
                    raise PlanError(
                        f"stage {stage}: a device gets {stop - start} samples of micro-batch {m}, but {captured.graph.name} could be "
                        f"captured for {sizes.fixed} samples only; choose shares and a micro_batch that give every device as many"
                    )


def _check_crossing(layout: Layout, captured: Captured, sizes: Sizes, stage: int) -> None:
    """Lanes that meet other lanes must be able to tell their samples apart in everything that crosses."""
    before = layout.plan.stages[stage - 1]
    for crossing in cut_stage(captured, before.start, before.stop).sends:
        if sizes.sample_dim(crossing) is None:
            name = captured.graph.layers[before.stop].name
            shape = ", ".join(map(str, crossing.shape))
            raise PlanError(
                f"stages {stage - 1} and {stage} divide micro-batches differently, but the value {crossing.name!r} of shape [{shape}], "
                f"which crosses the cut before {name!r}, has no dimension of samples; give both stages the same lanes, or cut elsewhere"
            )
