"""Coordinators, feeders and workers that lack one guard each: what the checker must notice (`python -m tests.simulate.bite`)."""

from typing import Any

from atoll.control import Coordinator, Feeder, Worker
from atoll.control.kernels import Kernels
from atoll.control.membership import Member
from atoll.control.messages import Ack, Attempt, Backward, Committed, FetchState, Forward, Manifest, Order, Round, StateChunk, SumPart, View
from atoll.control.reduction import Choice, Reduction, ReductionRound, SumSection, choose
from atoll.control.state_transfer import Fetch, Snapshots, StateDonor
from atoll.control.worker_state import NEVER, Buffer, Buffers
from atoll.simulate.swarm import SwarmRoles

__all__ = ["FAULTY", "without"]


def with_kernels(kernels: type[Kernels]) -> type[Worker]:
    return type("FaultyWorker", (Worker,), {"kernels_type": kernels})


def with_reduction(reduction: type[Reduction]) -> type[Worker]:
    return type("FaultyWorker", (Worker,), {"reduction_type": reduction})


# ---- coordinators


class ReducesIncomplete(Coordinator):
    def _is_complete(self, choices: tuple[Choice, ...]) -> bool:
        return super()._is_complete(choices) or all(choice.buffers for choice in choices)


class ChoosesOverlapping(Coordinator):
    def _choose(self, responders: list[Manifest]) -> tuple[Choice, ...]:
        return tuple(overlapping([each for each in responders if each.stage == s], self._all) for s in range(self.settings.stages))


def overlapping(manifests: list[Manifest], micro_batches: frozenset[int]) -> Choice:
    """All buffers, largest first, as `choose` takes them one by one."""
    single = [
        choose([Manifest(m.round, m.worker, m.incarnation, m.epoch, m.version, m.stage, (buffer,), m.state)], micro_batches)
        for m in manifests
        for buffer in m.buffers
    ]
    found = sorted((choice for choice in single if choice.buffers), key=lambda choice: (len(choice.missing), choice.buffers))
    missing = micro_batches.intersection(*(choice.missing for choice in found))
    buffers = tuple(buffer for choice in found for buffer in choice.buffers)
    return Choice(buffers, missing, sum(choice.loss for choice in found), sum(choice.weight for choice in found))


class CommitsWithoutAStage(Coordinator):
    def _is_covered(self, summing: ReductionRound, late: bool) -> bool:
        return super()._is_covered(summing, late) or (late and any(summing.reports))


class AnnouncesFirst(Coordinator):
    async def _commit_durably(self, record: Committed, summing: ReductionRound) -> None:
        await self._committed(record, summing)
        await self.journal.append(self.term, record)


class RepeatsRounds(Coordinator):
    def _next_round(self) -> Round:
        return 0, self._rounds


class CoordinatorOfNames(Coordinator):
    """Whoever comes back under a name is taken for the one before."""

    def _on_contributor_back(self, member: Member) -> None:
        pass

    def _is_from(self, manifest: Manifest, member: Member) -> bool:
        return manifest.worker not in self._manifests

    def _is_still(self, member: Member, incarnation: int) -> bool:
        return True


class CountsTheLost(Coordinator):
    def _survives(self, manifest: Manifest) -> bool:
        return True

    def _on_commit_in_seal(self, now: float) -> None:
        if not self._awaited:
            self._decide()


# ---- feeders


class FollowsOldAnnouncements(Feeder):
    def _is_outdated(self, order: Order) -> bool:
        return False


class BelievesAnyAttempt(Feeder):
    def _is_current(self, sample: Any, ack: Ack) -> bool:
        return True


# ---- workers


class GoesBack(Worker):
    def _is_outdated(self, order: Order) -> bool:
        return False


class AppliesAnyResult(Worker):
    def _is_committed(self, reduction: Reduction, commit: Committed) -> bool:
        return True


class IgnoresDigests(Worker):
    def _is_committed(self, reduction: Reduction, commit: Committed) -> bool:
        return reduction.round == commit.round


class LateSnapshots(Snapshots):
    """Whatever the state is by then."""

    def _copy(self) -> Any:
        return None

    async def _write(self, epoch: int, stage: int, taken: Any) -> None:
        await self._clock.sleep(2 * self._at.settings.patience_seconds)
        if self._at.state is not None:
            taken.content = super()._copy()
            await super()._write(epoch, stage, taken)

    async def _attest(self, taken: Any) -> None:
        pass


class StoresLater(Worker):
    snapshots_type = LateSnapshots


class ComputesOtherStages(Worker):
    def is_own_stage(self, stage: int) -> bool:
        return True


class ComputesOtherVersions(Worker):
    def is_own_step(self, step: int) -> bool:
        return True

    def is_ahead(self, message: Forward | Backward) -> bool:
        return False


class IgnoresEpochs(Worker):
    def is_own_epoch(self, epoch: int) -> bool:
        return True

    def _is_of_the_past(self, view: View) -> bool:
        return view.epoch != self.epoch and view.version != self.version


class MixingFetch(Fetch):
    def _is_of_this(self, message: StateChunk) -> bool:
        return message.stage == self.position[2]


class GivesWhatItHas(StateDonor):
    def _is_to_come(self, fetch: FetchState) -> bool:
        return False

    def _is_here(self, fetch: FetchState) -> bool:
        return True


class MixesVersions(Worker):
    fetch_type, donor_type = MixingFetch, GivesWhatItHas

    def _give_up_fetch(self) -> None:
        pass

    def _is_useless(self, fetch: Fetch, position: tuple[int, int, int], view: View) -> bool:
        fetch.position = position
        return False


class UsesAnyRound(Worker):
    def _is_same_round(self, held: Round | None, named: Round) -> bool:
        return True


class KeepsBuffers(Worker):
    def _clear_buffers(self) -> None:
        pass


class WorkerOfNames(Worker):
    def _is_own_incarnation(self, incarnation: int) -> bool:
        return True


class UsesNewWeights(Worker):
    def weights(self) -> Any:
        return self.state


class MixesSteps(Worker):
    def _next_buffers(self) -> Buffers:
        return self.buffers


# ---- what workers are made of


class SumsTwice(Kernels):
    def _is_summed(self, micro_batch: int) -> bool:
        return False


class SumsWhenFrozen(Kernels):
    def _is_frozen(self) -> bool:
        return False


class ListsTooEarly(Kernels):
    async def _land(self, buffer: Buffer, contribution: Any) -> None:
        self._clock.spawn(self._at.compute.accumulate(buffer.value, contribution))


class KnowsNumbersOnly(Kernels):
    def _token(self, attempt: Attempt) -> tuple[Round, int]:
        return NEVER, attempt.number

    def _key(self, message: Forward | Backward) -> tuple[int, Attempt | None]:
        return message.micro_batch, None


class CountingSection(SumSection):
    def _counts(self, part: SumPart, waiting_for: set[str]) -> bool:
        return True


class AddsDoubles(Reduction):
    section_type = CountingSection


class SumsInPlace(Reduction):
    def on_part(self, part: SumPart) -> None:
        total = self._sections[part.stage].on_part(part)
        if total is not None and part.stage == self.position[2]:
            self._buffers.get(0, self.position[2]).value[part.chunk] = total
        if total is not None:
            self._look()


FAULTY: dict[str, tuple[str, SwarmRoles]] = {
    "completeness": ("a step is reduced only when chosen buffers hold every micro-batch", SwarmRoles(coordinator=ReducesIncomplete)),
    "once": ("a worker adds a micro-batch only when its buffers do not hold it yet", SwarmRoles(worker=with_kernels(SumsTwice))),
    "duplicate-filter": ("a part that arrives twice is added to the sum once", SwarmRoles(worker=with_reduction(AddsDoubles))),
    "message-order": ("older announcements are ignored", SwarmRoles(feeder=FollowsOldAnnouncements, worker=GoesBack)),
    "disjointness": ("chosen buffers have no micro-batch in common", SwarmRoles(coordinator=ChoosesOverlapping)),
    "atomic-manifest": ("a manifest lists what has landed in its buffer", SwarmRoles(worker=with_kernels(ListsTooEarly))),
    "out-of-place": ("a sum is kept apart from the buffers it was made of", SwarmRoles(worker=with_reduction(SumsInPlace))),
    "journal-fence": ("the journal refuses records of an older term", SwarmRoles(fenced=False)),
    "token": ("attempts are known by whole tokens", SwarmRoles(feeder=BelievesAnyAttempt, worker=with_kernels(KnowsNumbersOnly))),
    "all-stages": ("a commit needs a reduced gradient of every stage", SwarmRoles(coordinator=CommitsWithoutAStage)),
    "round-digest": ("a commit is applied only to the result with its round and digest", SwarmRoles(worker=AppliesAnyResult)),
    "checkpoint-version": ("a checkpoint is a snapshot of exactly one version", SwarmRoles(worker=StoresLater)),
    "stage": ("work for another stage is refused", SwarmRoles(worker=ComputesOtherStages)),
    "version": ("work for another version is refused", SwarmRoles(worker=ComputesOtherVersions)),
    "journal-first": ("a record is durable before anyone hears of it", SwarmRoles(coordinator=AnnouncesFirst)),
    "fetch-version": ("fetched chunks are all of one epoch and version", SwarmRoles(worker=MixesVersions)),
    "term-digest": ("rounds of different terms differ; digests are compared", SwarmRoles(coordinator=RepeatsRounds, worker=IgnoresDigests)),
    "freeze": ("nothing is added to a buffer whose manifest was reported", SwarmRoles(worker=with_kernels(SumsWhenFrozen))),
    "round-match": ("parts and sums of another round are refused", SwarmRoles(worker=UsesAnyRound)),
    "clear": ("buffers are emptied when the state beneath them changes", SwarmRoles(worker=KeepsBuffers)),
    "incarnation": ("who comes back under a name is somebody new", SwarmRoles(coordinator=CoordinatorOfNames, worker=WorkerOfNames)),
    "epoch": ("messages of an older epoch are refused", SwarmRoles(worker=IgnoresEpochs)),
    "same-weights": ("with staleness all of a step is computed with the same weights", SwarmRoles(worker=UsesNewWeights)),
    "survived": ("with staleness a manifest counts only from a state with the last commit", SwarmRoles(coordinator=CountsTheLost)),
    "set-aside": ("with staleness the sums of two steps are kept apart", SwarmRoles(worker=MixesSteps)),
}
"""What each guard is for, by name, and roles that lack it."""


def without(*names: str) -> SwarmRoles:
    """Roles that lack one guard; those of production where none is named."""
    assert len(names) <= 1
    return FAULTY[names[0]][1] if names else SwarmRoles()
