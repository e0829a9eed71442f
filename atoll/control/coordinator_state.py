"""Where a coordinator stands: its term and step, who is there, and on whom the step under way can rely."""

from collections import Counter
from heapq import nsmallest

from atoll.control.journal import Epoch
from atoll.control.membership import Member, Members, WorkerIdentity
from atoll.control.messages import Committed, Peer, Phase, Reduce, Run, Seal
from atoll.control.settings import Settings
from atoll.control.state_transfer import DONORS
from atoll.control.world import Journal, SwarmProcess

__all__ = ["CoordinatorState"]


class CoordinatorState:
    """What a coordinator's parts share. `Coordinator` changes it as the rules say; what has checkpoints stored reads it."""

    def __init__(self, node: SwarmProcess, journal: Journal, settings: Settings) -> None:
        self.node, self.journal, self.settings = node, journal, settings
        self.term = self.seq = self.beat = 0
        self.epoch = self.version = 0
        self.origin = Epoch(0, 0, 0)  # of the epoch
        self.commit: Committed | None = None  # the last one of the epoch
        self.phase: Phase = Seal((0, 0))  # of the step under way
        self.trailing: Reduce | None = None  # with staleness: how the step before it is summed
        self.members = Members(settings, 0)
        self.barred: set[str] = set()  # from this step
        self.stopping = False
        self.routes: tuple[tuple[Peer, ...], ...] = ()
        self.routed: dict[WorkerIdentity, float] = {}  # workers in the routes since this RUN began, and since when
        self.lost: tuple[WorkerIdentity, ...] = ()  # those of them who are gone

    @property
    def step(self) -> int:
        """The step under way."""
        return self.version + (self.trailing is not None)

    def has_state(self, member: Member) -> bool:
        """Whether it has the state of this version, or will once it hears of the commit."""
        return Members.current(member, self.epoch, self.version, self.commit)

    def answering(self, now: float) -> list[Member]:
        """Workers with the state of this version, heard and hearing, not barred from this step."""
        members = self.members
        return [
            member
            for member in members
            if member.worker and member.name not in self.barred and self.has_state(member) and members.live(member, now, self.beat)
        ]

    def usable(self, now: float) -> list[Member]:
        """Those who can be given work: one that wants to leave only where its stage has nobody else."""
        answering = self.answering(now)
        served = {member.stage for member in answering if not member.leaving}
        return [member for member in answering if not member.leaving or member.stage not in served]

    def feeders(self, now: float) -> list[Member]:
        """Those heard and hearing."""
        return [member for member in self.members if not member.worker and self.members.live(member, now, self.beat)]

    def can_run(self, now: float) -> bool:
        """Whether every stage and the feeders have somebody. Rather somebody doubtful than nobody: who was barred from others may come."""
        served = {member.stage for member in self.usable(now)}
        if len(served) == self.settings.stages:
            return bool(self.feeders(now))
        for name in sorted(self.barred):
            member = self.members.get(name)
            if member is None or member.stage not in served:
                self.barred.discard(name)
        return False

    def find_routes(self, now: float) -> None:
        """Rule 12. Who wants to leave works until it is let go, after the step: what it has begun counts."""
        usable = self.answering(now)
        self.routes = Members.peers(usable, self.settings.stages)
        if type(self.phase) is Run:
            for member in usable:
                self.routed.setdefault(member.identity, now)
            self.lost = tuple(sorted(who for who in self.routed if not self._there(*who, now)))

    def _there(self, name: str, incarnation: int, now: float) -> bool:
        """Whether a worker is heard and is still who it was."""
        member = self.members.get(name)
        return member is not None and member.incarnation == incarnation and self.members.heard(member, now)

    def donors(self, member: Member) -> tuple[str, ...]:
        """Rule 13. Some who have the state: the same ones as long as they are there, and of the others those who give to the fewest.

        They stay the same over a commit that the joiner misses: who gave the state before it has kept that.
        """
        there = {peer.worker for peer in self.routes[member.stage]} - {member.name} if self.routes else set()
        kept = tuple(name for name in member.donors if name in there)
        if len(kept) < min(DONORS, len(there)):
            fetching = [other for other in self.members if other is not member and not self.has_state(other)]
            busy = Counter(name for other in fetching for name in other.donors)
            others = sorted(there.difference(kept))
            turn = member.incarnation % len(others)
            kept += tuple(nsmallest(DONORS - len(kept), others[turn:] + others[:turn], key=lambda name: busy[name]))
        member.donors = kept
        return kept
