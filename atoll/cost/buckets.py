"""Buckets: in which pieces gradients are synchronised while backward still runs.

Every bucket costs the latency of an all-reduce; the last one is reduced when nothing is left to hide it. So small buckets leave less to
wait for, and large ones waste less on latency: the size with the least of both together is taken.
"""

from atoll.cost.communication import Span, all_reduce_seconds
from atoll.cost.evaluate import Evaluator
from atoll.plan import Plan

__all__ = ["DEFAULT_BUCKET_BYTES", "bucket_bytes"]

DEFAULT_BUCKET_BYTES = 25 * 2**20  # where nothing is known of the links
_SIZES = [1 << power for power in range(18, 29)]  # 256 KB to 256 MB


def bucket_bytes(evaluator: Evaluator, plan: Plan) -> int:
    """The size of buckets for the stage with the most gradient to synchronise."""
    volumes = [(nbytes, stage, across) for stage in plan.stages for across, nbytes in evaluator.sync_volumes(stage) if nbytes]
    for nbytes, stage, across in sorted(volumes, key=lambda volume: -volume[0]):
        span = evaluator.sync_span(stage, across)
        if span is not None:
            seconds = {size: _exposed_seconds(evaluator, span, nbytes, size) for size in _SIZES}
            return min(_SIZES, key=seconds.__getitem__)
    return DEFAULT_BUCKET_BYTES


def _exposed_seconds(evaluator: Evaluator, span: Span, total_bytes: float, size: int) -> float:
    """The last bucket, which nothing hides, and the latency of all."""
    last = all_reduce_seconds(span, min(float(size), total_bytes), evaluator.calibration, {})
    return last + total_bytes / size * all_reduce_seconds(span, 1.0, evaluator.calibration, {})
