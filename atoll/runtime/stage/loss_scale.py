"""Loss scale: what keeps small fp16 gradients from vanishing, decided alike by everybody who trains a part of the model."""

from typing import Any

__all__ = ["LossScale"]


class LossScale:
    """What fp16 losses are multiplied by: doubled after many good steps, halved after an overflow, the same for all.

    The numbers are those of `torch.amp.GradScaler`, which cannot be told of overflows elsewhere.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 65536.0 if enabled else 1.0
        self.good_steps = 0

    def update(self, overflowed: bool) -> None:
        """After a step."""
        if not self.enabled:
            return
        if overflowed:
            self.value, self.good_steps = self.value * 0.5, 0
            return
        self.good_steps += 1
        if self.good_steps == 2000:
            self.value, self.good_steps = self.value * 2.0, 0

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps, "enabled": self.enabled}

    def restore(self, state: dict[str, Any]) -> None:
        """What `state` gave; a run that did not scale before, or does not now, begins as it would anew."""
        if not (self.enabled and state.get("enabled", True)):
            return
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
