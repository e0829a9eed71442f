"""A site's rank between two steps: rank 0 asks the exchange what is to be done, and all ranks of the site do it together."""

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from atoll.events import Note, StepFinished
from atoll.runtime.modes.islands.exchange import SiteExchange, SiteOrder
from atoll.runtime.modes.islands.weights import SiteWeights
from atoll.runtime.modes.lockstep.heartbeat import Doing
from atoll.runtime.modes.lockstep.worker import RankTraining
from atoll.runtime.training import Reason

__all__ = ["SiteSteps", "site_weights"]

_PATIENCE = timedelta(days=30)  # ranks wait for their site's rank 0, which waits for other sites
_KINDS = ("go on", "border", "change", "end", "interrupted")
_WAITING = Doing("waiting for the other sites", "others")
_REASONS: dict[str, Reason] = {"end": "done", "interrupted": "interrupted"}


def site_weights(training: RankTraining) -> SiteWeights:
    """What this rank has of what is exchanged. All ranks call it together."""
    trained = [owned.held for owned in training.work.owned if owned.leaf.requires_grad]
    return SiteWeights(trained, dist.new_group(backend="gloo", timeout=_PATIENCE))


class SiteSteps:
    """What happens between steps. `exchange` is rank 0's; the other ranks hear what it says."""

    def __init__(self, training: RankTraining, weights: SiteWeights, exchange: SiteExchange | None) -> None:
        self.training, self.weights, self.exchange = training, weights, exchange
        self._group = weights.group

    def begin(self) -> bool:
        """Waits for a state to begin with, and begins with it. False: somebody asked to stop before there was one."""
        training, found = self.training, None
        training.run.doing(_WAITING)
        if self.exchange is not None:
            found = self.exchange.start(lambda: training.run.stop_asked)
        step = self._say(-1 if self.exchange is not None and found is None else found[0] if found is not None else 0)
        if step < 0:
            training.trainer.reason = "interrupted"
            return False
        self.weights.replace(found[1] if found is not None else None)
        self._go_to(step)
        training.trainer.after_update = self.after_update
        return True

    def _go_to(self, step: int) -> None:
        """As if so many steps had been made: data and schedule go on there. What the optimizer remembered of them is gone."""
        trainer = self.training.trainer
        known = trainer.last_step
        if step == known:
            return
        trainer.losses = [*trainer.losses[:step], *[float("nan")] * (step - known)]
        scheduler = trainer.updater.scheduler
        if step > known and scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer has made no step yet
                for _ in range(step - known):
                    scheduler.step()
        message = f"this site goes on after {step} of its steps with the common weights; its optimizer begins anew"
        trainer.tell(Note(at_seconds=trainer.moment(), message=message))
        trainer.reason = "done" if step >= self.training.job.total_steps else None

    def finish(self) -> None:
        """A site that had made all its steps before still takes part in the rounds that lack them."""
        while self.training.trainer.reason == "done" and not self._acts():
            pass

    def after_update(self, event: StepFinished) -> Reason | None:
        """All there is to do after a step; why no step follows, if none does."""
        if self.exchange is not None:
            self.exchange.record(event.step, event.loss, event.weight)
        while True:
            ended = self._acts()
            if ended is not None:
                return _REASONS.get(ended)

    def _acts(self) -> str | None:
        """One thing; what ended it, if nothing more is to be done now."""
        self.training.run.doing(_WAITING)
        order = self.exchange.next_order(lambda: self.training.run.stop_asked) if self.exchange is not None else None
        said = self._say(_code(order) if order is not None else 0)
        kind, has_base, fresh = _KINDS[said & 7], bool(said & 8), bool(said & 16)
        if kind == "border":
            row = self.weights.gather()
            self.weights.remember()
            if self.exchange is not None:
                assert row is not None
                self.exchange.put_border(row)
        elif kind == "change":
            self._change(order, has_base, fresh)
        else:
            return kind
        return None

    def _change(self, order: SiteOrder | None, has_base: bool, fresh: bool) -> None:
        self.training.run.doing("taking over the common weights")
        row, base = (order.weights, order.base) if order is not None else (None, None)
        if fresh:
            self.weights.replace(row)
        else:
            self.weights.carry_over(row, base, remembered=not has_base)
        if self.exchange is not None:
            self.exchange.changed()

    def _say(self, number: int) -> int:
        """What rank 0 says to all."""
        if dist.get_world_size(self._group) == 1:
            return number
        said = torch.tensor([number])
        dist.broadcast(said, group=self._group, group_src=0)
        return int(said.item())


def _code(order: SiteOrder) -> int:
    return _KINDS.index(order.kind) | (8 if order.base is not None else 0) | (16 if order.fresh else 0)
