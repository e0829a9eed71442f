"""A rank of a site whose gradients are added up with those of all other sites at every step: one synchronous run over all of them."""

import hashlib
import time
from pathlib import Path

import msgspec
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from atoll.codec.registry import make_codec
from atoll.errors import AtollError, JobError
from atoll.events import (
    AnyEvent,
    CheckpointFailed,
    CheckpointIntervalChosen,
    CheckpointRestored,
    CheckpointSaved,
    Evaluated,
    EvaluationFailed,
    NonFinite,
    Note,
    Observer,
    StepFinished,
    Warned,
)
from atoll.fabric.security import Credentials
from atoll.fabric.shaped import LinkChoice
from atoll.job import Job
from atoll.runtime.checkpoint.checkpointer import SavePolicy
from atoll.runtime.mode import CapturedJob
from atoll.runtime.modes.islands.borders import IslandBorders
from atoll.runtime.modes.islands.gateway_thread import SiteAccount
from atoll.runtime.modes.islands.gradient_exchange import GradientExchange
from atoll.runtime.modes.islands.gradient_gateway import GradientGateway
from atoll.runtime.modes.islands.gradient_sums import GradientSums
from atoll.runtime.modes.islands.owed_gradients import read_owed, write_owed
from atoll.runtime.modes.islands.spec import IslandsSpec, directory_of_site
from atoll.runtime.modes.lockstep.heartbeat import Doing
from atoll.runtime.modes.lockstep.role import Role
from atoll.runtime.modes.lockstep.worker import RankTraining, training_rank
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.training import Reason, train

__all__ = ["train_site_by_gradients"]

_MEETING = Doing("waiting for the other sites", "others")
_RUNS_OWN = (
    CheckpointFailed,
    CheckpointIntervalChosen,
    CheckpointRestored,
    CheckpointSaved,
    Evaluated,
    EvaluationFailed,
    NonFinite,
    StepFinished,
)
"""What the first site relays: it concerns the run."""


class _SavesTogether(SavePolicy):
    """When it is due by the policy of the first site's rank 0, which all ranks of all sites have heard with the step's totals."""

    def __init__(self, own: SavePolicy, exchange: GradientExchange) -> None:
        super().__init__(1, step=0, moment=0.0)
        self._own, self._exchange = own, exchange

    def due(self, step: int, moment: float) -> bool:
        return self._exchange.told

    def ended(self, seconds: float) -> None:
        self._own.ended(seconds)

    def decision(self, step: int, moment: float) -> CheckpointIntervalChosen | None:
        return self._own.decision(step, moment)


class _Steps:
    """What a rank does beside its steps: it keeps what is owed, and tells the run."""

    def __init__(
        self, training: RankTraining, exchange: GradientExchange, gateway: GradientGateway | None, first: bool, path: Path
    ) -> None:
        self.training, self.exchange, self.gateway, self._first, self._path = training, exchange, gateway, first, path
        self._policy = training.policy
        self._kept_at = training.trainer.last_step
        self._due = (0, False)  # of which step it was asked last, and whether it is saved
        exchange.flag = self._is_due
        trainer = training.trainer
        trainer.with_others, trainer.after_update, trainer.save_first = exchange.totals, self._after_update, None
        if self._policy is not None:
            training.policy = _SavesTogether(self._policy, exchange)
        if not first:
            training.checkpoints = None  # the first site saves what is the same at all of them

    def _is_due(self) -> bool:
        """Asked at rank 0 of the first site, while a step is made."""
        step, policy = self.training.trainer.last_step + 1, self._policy
        if not self._first or policy is None or step >= self.training.job.total_steps:
            return False
        if step != self._due[0]:  # a step may have several losses, and ask for each
            self._due = step, policy.due(step, self.training.trainer.elapsed())
            if self._due[1]:
                policy.begun(step)
        return self._due[1]

    def _after_update(self, event: StepFinished) -> Reason | None:
        if self.gateway is not None:
            self.training.trainer.stopping |= self.gateway.stop_asked
        if self.exchange.told:
            self.keep()
        return None

    def keep(self) -> None:
        """All sites keep what they owe after this step, before the first one saves it."""
        step = self.training.trainer.last_step
        if step == self._kept_at:
            return
        self._kept_at = step
        self.training.run.doing(Doing("waiting for the other sites to keep what they owe", "others"))
        digest = ""
        if self.exchange.sums is not None:
            write_owed(self._path, step, self.exchange.sums.owed())
            digest = _digest(self.training)
            message = f"{self.exchange.sums.own} has the weights {digest} after step {step}"
            self.training.trainer.tell(Note(at_seconds=self.training.trainer.moment(), message=message))
        different = self.exchange.differ(digest)
        if different and self._first:
            message = (
                f"step {step}: the weights of {' and '.join(different)} are not those of the other sites to the last bit: its processors "
                "round another way in the optimizer; they stay close, since all sites apply the same gradients"
            )
            self.training.trainer.tell(Warned(at_seconds=self.training.trainer.moment(), message=message))

    def begin(self) -> None:
        """All sites go on after the same step, with the same model, and with what they owed then."""
        training, step = self.training, self.training.trainer.last_step
        training.run.doing(_MEETING)
        for turn in training.work.turns:
            if isinstance(turn.executor.updater.scheduler, ReduceLROnPlateau):
                raise JobError(
                    "--exchange gradients: ReduceLROnPlateau waits for evaluations, which only the first site makes; take another schedule"
                )
        sums = self.exchange.sums
        if sums is not None:
            owed = read_owed(self._path, step) if step else {}
            if owed is None:
                message = f"{sums.own} has nothing stored of what it owes after step {step}: it begins with nothing owed"
                training.trainer.tell(Note(at_seconds=training.trainer.moment(), message=message))
            sums.owe(owed or {})
            _check_alike(sums, step, _digest(training))
        self.exchange.wait_for_rank_0()


def _check_alike(sums: GradientSums, step: int, weights: str) -> None:
    said = sums.share([float(step)], f"{hashlib.blake2b(sums.shape().encode(), digest_size=16).hexdigest()} {weights}")
    for site, each in zip(sums.sites, said, strict=True):
        if each.values != said[0].values:
            raise AtollError(f"{site} begins after step {each.values[0]:.0f}, and {sums.sites[0]} after step {said[0].values[0]:.0f}")
        what = [name for name, a, b in zip(("parameters", "weights"), each.text.split(), said[0].text.split(), strict=True) if a != b]
        if what:
            raise AtollError(f"{site} begins with other {' and '.join(what)} than {sums.sites[0]}; the model must be the same at all sites")


def _digest(training: RankTraining) -> str:
    """Of all trained weights; this rank has them whole."""
    total = hashlib.blake2b(digest_size=16)
    for owned in sorted(training.work.owned, key=lambda owned: owned.name):
        if owned.leaf.requires_grad:
            total.update(owned.leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def train_site_by_gradients(
    run: RunDirectory,
    spec: IslandsSpec,
    site: str,
    role: Role,
    job: Job,
    *,
    known: CapturedJob | None,
    credentials: Credentials | None,
    address: str,
    observer: Observer,
    links: LinkChoice | None = None,
) -> None:
    """From meeting the site's other ranks to the end of the run. `credentials` are rank 0's, at `address` is the coordinator."""
    own, first = spec.site(site), site == spec.first
    share = job.share(own.start, own.stop, evaluates=first)
    for since, more in spec.growth:
        share.samples.grow(since, more)
    directory = directory_of_site(run, site, first)
    captured = CapturedJob(share, known.captured, known.evaluated if first else {}) if known is not None else None
    names = [each.name for each in spec.sites]
    training: RankTraining | None = None
    base = 0
    sums = GradientSums(names, site, make_codec(spec.choice.codec), lambda: base) if credentials is not None else None
    exchange = GradientExchange(sums, spec.batch_size, spec.bucket_bytes)
    gateway: GradientGateway | None = None

    def relay(event: AnyEvent) -> None:
        if gateway is not None and isinstance(event, _RUNS_OWN):
            whole = msgspec.structs.replace(event, samples=spec.batch_size) if isinstance(event, StepFinished) else event
            gateway.relay(whole)

    began, polite = time.monotonic(), False
    try:
        with training_rank(
            share, directory.plan(), role, directory=directory, settings=directory.settings(),
            observers=[relay] if first and credentials is not None else [], own=observer, notes_shown=True, known=captured,
            cluster=run.load_cluster(), outer=exchange,
        ) as training:  # fmt: skip
            base = training.trainer.last_step
            exchange.meet()
            if sums is not None and credentials is not None:
                suffix = credentials.name.removeprefix(site)  # all sites are started together, under one number
                others = {name: f"{name}{suffix}" for name in names if name != site}
                guard = IslandBorders(spec.may_send).guard(run, site, credentials.name)
                gateway = GradientGateway(credentials, address, others, sums, spec.fingerprint, observer, links, guard)
                gateway.start()
            steps = _Steps(training, exchange, gateway, first, directory.path)
            steps.begin()
            train(training)
            steps.keep()
            exchange.wait_for_rank_0()
            if gateway is not None:
                gateway.finish()
            reason = training.reason or "stopped"
        polite = True
        if gateway is not None and sums is not None:
            seconds = time.monotonic() - began
            gateway.tell(
                SiteAccount(ended=reason, steps=training.trainer.last_step - base, waited_seconds=sums.waited_seconds, seconds=seconds)
            )
    finally:
        if gateway is not None:
            gateway.close(polite)
