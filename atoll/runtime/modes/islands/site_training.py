"""A site's rank between two steps: rank 0 asks the exchange what is to be done, and all ranks of the site do it together."""

import threading
import warnings
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from atoll.control.rounds.messages import SiteJoined
from atoll.errors import JobFailedError
from atoll.events import CheckpointBegun, Note, StepFinished
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.checkpoint.training_state import training_state
from atoll.runtime.modes.islands.exchange import SiteExchange, SiteOrder
from atoll.runtime.modes.islands.saved import SavedExchange, write_exchange
from atoll.runtime.modes.islands.spec import MARK
from atoll.runtime.modes.islands.weights import SiteWeights
from atoll.runtime.modes.lockstep.heartbeat import Doing
from atoll.runtime.modes.lockstep.worker import RankTraining
from atoll.runtime.training import Reason

__all__ = ["SiteSteps", "site_weights"]

_PATIENCE = timedelta(days=30)  # ranks wait for their site's rank 0, which waits for other sites
_KINDS = ("go on", "border", "change", "end", "interrupted", "grow")
_BASE, _FRESH, _SAVE = 8, 16, 32  # said with what is to be done
_WAITING = Doing("waiting for the other sites", "others")
_REASONS: dict[str, Reason] = {"end": "done", "interrupted": "interrupted"}


def site_weights(training: RankTraining) -> SiteWeights:
    """What this rank has of what is exchanged. All ranks call it together."""
    trained = [owned.held for owned in training.work.owned if owned.leaf.requires_grad]
    return SiteWeights(trained, dist.new_group(backend="gloo", timeout=_PATIENCE))


class SiteSteps:
    """What happens between steps. `exchange` is rank 0's; the other ranks hear what it says.

    `base` is how many steps the site had made before these rounds, whose `number` tells them from others of the run;
    `losses` are those of the run's steps, for what this process has not made itself.
    """

    def __init__(
        self,
        training: RankTraining,
        weights: SiteWeights,
        exchange: SiteExchange | None,
        base: int,
        number: int,
        losses: Mapping[int, float],
    ) -> None:
        self.training, self.weights, self.exchange, self._base, self._number = training, weights, exchange, base, number
        self._losses = losses
        self._group, self._every, self._saved_at = weights.group, training.settings.checkpoint_every, base
        self._writing: threading.Thread | None = None
        training.policy = training.trainer.save_first = None  # saves are made where a round ends

    def begin(self) -> bool:
        """Waits for a state to begin with, and begins with it. False: somebody asked to stop before there was one."""
        training, found = self.training, None
        training.run.doing(_WAITING)
        if self.exchange is not None:
            found = self.exchange.start(lambda: training.run.stop_asked)
        step = self._say(-1 if self.exchange is not None and found is None else found[0] if found is not None else 0)
        if step < 0:
            training.trainer.reason, training.checkpoints = "interrupted", None
            return False
        self._grow(self.exchange.new_joined() if self.exchange is not None else ())
        self.weights.replace(found[1] if found is not None else None)
        self._go_to(self._base + step)
        self._saved_at = self._base + step
        training.trainer.after_update = self.after_update
        return True

    def _go_to(self, step: int) -> None:
        """As if so many steps had been made: data and schedule go on there."""
        trainer = self.training.trainer
        known = trainer.last_step
        if step == known:
            return
        trainer.losses = [*trainer.losses[:step], *(self._losses.get(number, 0.0) for number in range(known + 1, step + 1))]
        jobs = list(self.training.job.turns.values())
        for job, turn in zip(jobs, self.training.work.turns, strict=True):
            if turn.executor.updater.scheduler is None:
                continue
            for group in turn.optimizer.param_groups:
                group["lr"] = group.get("initial_lr", group["lr"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer has made no step yet
                scheduler = turn.executor.updater.scheduler = job.build_scheduler(turn.optimizer)
                assert scheduler is not None
                for _ in range(step):
                    scheduler.step()
        memory = f"has what it remembers after {known}" if known else "begins anew"
        message = f"this site goes on after {step} of its steps with the common weights; its optimizer {memory}"
        trainer.tell(Note(at_seconds=trainer.moment(), message=message))
        trainer.reason = "done" if step >= self.training.job.total_steps else None

    def finish(self) -> None:
        """A site that had made all its steps before still takes part in the rounds that lack them."""
        ended = None
        while self.training.trainer.reason == "done" and ended is None:
            ended = self._acts()

    def after_update(self, event: StepFinished) -> Reason | None:
        """All there is to do after a step; why no step follows, if none does."""
        if self.exchange is not None:
            self.exchange.record(event.step - self._base, event.loss, event.weight, event.seconds)
        while True:
            ended = self._acts()
            if ended is not None:
                return _REASONS.get(ended)

    def _acts(self) -> str | None:
        """One thing; what ended it, if nothing more is to be done now."""
        self.training.run.doing(_WAITING)
        order = self.exchange.next_order(lambda: self.training.run.stop_asked) if self.exchange is not None else None
        said = self._say(self._code(order) if order is not None else 0)
        kind = _KINDS[said & 7]
        if kind == "border":
            row = self.weights.gather()
            self.weights.remember()
            if self.exchange is not None:
                assert row is not None
                self.exchange.put_border(row)
            return None
        if kind == "grow":
            self._grow(order.joined if order is not None else ())
            return None
        if kind == "change":
            self._change(order, bool(said & _BASE), bool(said & _FRESH))
        if said & _SAVE:
            self._save(final=kind in _REASONS)
        return None if kind == "change" else kind

    def _grow(self, joined: tuple[SiteJoined, ...]) -> None:
        """Batches grow by the samples of sites that joined. All ranks hear of them from rank 0."""
        samples = self.training.job.samples
        for number in range(self._say(len(joined))):
            since, more = (self._say(value) for value in ((joined[number].first, joined[number].samples) if joined else (0, 0)))
            if samples.asked >= since:
                raise JobFailedError(
                    f"another site has samples of the batches from step {since + 1} on, and this one is at step {samples.asked + 1} "
                    "already: it was not heard for too long; it begins again with what the common state has"
                )
            samples.grow(since, more)
        if self.exchange is not None and joined:
            self.exchange.grown(joined)

    def _code(self, order: SiteOrder) -> int:
        ends = order.kind in _REASONS
        due = order.kind == "change" and self._every is not None and self._base + order.cursor >= self._saved_at + self._every
        bits = (_BASE if order.base is not None else 0) | (_FRESH if order.fresh else 0) | (_SAVE if ends or due else 0)
        return _KINDS.index(order.kind) | bits

    def _change(self, order: SiteOrder | None, has_base: bool, fresh: bool) -> None:
        self.training.run.doing("taking over the common weights")
        row, base = (order.weights, order.base) if order is not None else (None, None)
        if fresh:
            self.weights.replace(row)
        else:
            self.weights.carry_over(row, base, remembered=not has_base)
        if self.exchange is not None:
            self.exchange.changed()

    def _save(self, *, final: bool) -> None:
        """The common state, as it is after the site's cursor; the optimizer inside is some steps on where an update travelled meanwhile."""
        training, trainer = self.training, self.training.trainer
        saved = self.exchange.saved() if self.exchange is not None else None
        step = self._base + self._say(saved.cursor if saved is not None else 0)
        self._saved_at = step
        if saved is not None:
            self._keep(saved, final)
        if training.checkpoints is None or not step:
            return
        training.run.doing("saving a checkpoint")
        trainer.tell(CheckpointBegun(at_seconds=trainer.moment(), step=step))
        extra = training_state(trainer.scheduler, trainer.updater.scale, trainer.losses[:step])
        extra |= {"callbacks": {}, "data": None, "unevaluated": False}
        if saved is not None:
            extra[MARK] = {"number": self._number, "position": list(saved.position)}
        training.checkpoints.save(step, self._shards(saved), optimizers=trainer.optimizers, extra=extra, final=final)
        training.tell_saved(training.checkpoints)
        if final:
            training.run.saved(step)
            training.checkpoints = None  # what follows is in no common state

    def _keep(self, saved: SavedExchange, final: bool) -> None:
        """Beside the training, but for the last time."""
        if self._writing is not None:
            self._writing.join()
        assert self.training.directory is not None
        self._writing = threading.Thread(target=write_exchange, args=(self.training.directory.path, saved))
        self._writing.start()
        if final:
            self._writing.join()

    def _shards(self, saved: SavedExchange | None) -> list[LocalShard]:
        """Everything a checkpoint has, with the common weights in place of this site's."""
        common = {id(shard.known_as): shard for shard in self.weights.shards_of(saved.state.weights if saved is not None else None)}
        return [common.get(id(shard.known_as), shard) for shard in self.training.work.executor.shards()]

    def _say(self, number: int) -> int:
        """What rank 0 says to all."""
        if dist.get_world_size(self._group) == 1:
            return number
        said = torch.tensor([number])
        dist.broadcast(said, group=self._group, group_src=0)
        return int(said.item())
