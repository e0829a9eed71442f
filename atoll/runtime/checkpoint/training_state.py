"""What a checkpoint has beside tensors and the optimizer's values: schedule, loss scale, losses so far. The same in every mode.

Randomness and the position in the data are functions of the job's seed and the step, so the step says both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from atoll.errors import CheckpointError
from atoll.runtime.executor import LossScale

__all__ = ["restore_training", "training_state"]


def training_state(scheduler: LRScheduler | None, scale: LossScale, losses: Sequence[float]) -> dict[str, Any]:
    """As a checkpoint keeps it, in `extra`. Functions of a schedule are left out: the script makes them again."""
    schedule = None
    if scheduler is not None:
        schedule = {key: value for key, value in scheduler.state_dict().items() if not callable(value)}
    return {"scheduler": schedule, "loss_scale": scale.state(), "losses": list(losses)}


def restore_training(extra: Mapping[str, Any], step: int, scheduler: LRScheduler | None, scale: LossScale) -> list[float]:
    """Schedule and scale as they were after `step` steps; returns the losses until then."""
    scale.restore(extra["loss_scale"])
    if scheduler is not None and extra["scheduler"] is not None:
        scheduler.load_state_dict(extra["scheduler"])
    losses = [float(loss) for loss in extra["losses"]]
    if len(losses) != step:
        raise CheckpointError(f"the checkpoint of step {step} has {len(losses)} losses; it is damaged, or of another version of Atoll")
    return losses
