"""Pipeline schedules, played task by task: when every micro-batch is where, and how long the step is.

Three engines give the same answer where several apply: `column_seconds` for one column of stages, `play_routes` for micro-batches on any
routes, `play_virtual_stages` for devices with several stages each. A runtime can follow the order they find.
"""

from collections.abc import Sequence

from atoll.cost.routed import play_routes
from atoll.cost.virtual_stages import play_virtual_stages
from atoll.cost.workers import Hops, Timeline, Worker

__all__ = ["simulate"]


def simulate(
    workers: Sequence[Sequence[Worker]],
    routes: Sequence[Sequence[int]],
    onward: Sequence[Hops],
    back: Sequence[Hops],
    schedule: str,
    limits: Sequence[int],
) -> Timeline:
    """Plays a step. `routes[s][m]` is the worker of stage s for micro-batch m; `onward[s][i, j]` leads from worker i of stage s to worker j
    of stage s+1, `back[s][i, j]` the other way; `limits[d]` bounds the micro-batches device d may hold."""
    # GPipe holds everything: its limit is never reached before the last forward
    bounds = [len(routes[0]) * len(workers) + 1] * len(limits) if schedule == "gpipe" else limits
    devices = [worker.device for row in workers for worker in row]
    if len(set(devices)) < len(devices):
        return play_virtual_stages(workers, routes, onward, back, bounds)
    return play_routes(workers, routes, onward, back, [[bounds[worker.device] for worker in row] for row in workers])
