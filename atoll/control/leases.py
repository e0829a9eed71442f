"""Leases: which feeder starts which micro-batches of a RUN, and how far they are."""

from collections.abc import Sequence

from atoll.control.adaptive_timeout import AdaptiveTimeout
from atoll.control.membership import Member, Members
from atoll.control.messages import FeederBeat, Round

__all__ = ["Leases"]


class Leases:
    """Of one RUN at a time."""

    def __init__(self, patience: AdaptiveTimeout) -> None:
        self._timeout = patience
        self._leases: dict[str, tuple[int, tuple[int, ...]]] = {}  # by feeder: its incarnation and micro-batches
        self._progress_at = 0.0
        self._progress: dict[str, int] = {}

    def divide(self, micro_batches: Sequence[int], feeders: Sequence[Member], now: float) -> None:
        """A RUN opens: each feeder gets about as many."""
        count = len(feeders)
        self._leases = {feeder.name: (feeder.incarnation, tuple(micro_batches[i::count])) for i, feeder in enumerate(feeders)}
        self._progress_at = now
        self._progress = {}

    def of(self, feeder: Member) -> tuple[int, ...]:
        """What a feeder starts: nothing where it is somebody else by now."""
        incarnation, lease = self._leases.get(feeder.name, (0, ()))
        return lease if incarnation == feeder.incarnation else ()

    @property
    def feeders(self) -> int:
        """How many have something to start; 1 where nobody has."""
        return sum(1 for _, lease in self._leases.values() if lease) or 1

    def remaining(self, members: Members, round: Round) -> int:
        """Micro-batches of the RUN that are not finished, as far as was heard."""
        there = [(members.get(name), len(lease)) for name, (_, lease) in self._leases.items()]
        return sum(count - (member.done if member is not None and member.round == round else 0) for member, count in there)

    def hear(self, beat: FeederBeat, now: float) -> None:
        """A feeder tells how far it is."""
        if beat.progress > self._progress.get(beat.feeder, -1):
            self._progress[beat.feeder] = beat.progress
            self._timeout.measured(now - self._progress_at)
            self._progress_at = now

    def pending(self, members: Members, round: Round, now: float) -> bool:
        """Whether a feeder that is there still has something to do."""
        for name, (incarnation, lease) in self._leases.items():
            member = members.get(name)
            if not lease or (member is not None and member.round == round and member.done >= len(lease)):
                continue
            if member is not None and member.incarnation == incarnation and members.heard(member, now):
                return True
        return False

    def stuck(self, now: float) -> bool:
        """Whether nothing has moved for longer than it takes."""
        if now - self._progress_at <= self._timeout.seconds():
            return False
        self._timeout.failed()
        return True
