"""Storing: the checkpoint that is under way, and who writes it."""

from collections.abc import Iterable

from atoll.control.membership import Member

__all__ = ["Storing"]


class Storing:
    """One worker of every stage stores the state of one version; a new checkpoint supersedes one that is unfinished."""

    def __init__(self) -> None:
        self.version = -1  # -1: none
        self._writers: dict[int, str] = {}

    def begin(self, version: int, usable: Iterable[Member]) -> None:
        """The first of every stage writes."""
        self.version, self._writers = version, {}
        for member in usable:
            self._writers.setdefault(member.stage, member.name)

    def end(self) -> None:
        """It is whole, or of no use any more."""
        self.version = -1

    def writes(self, member: Member) -> bool:
        """Whether this worker stores its stage."""
        return self.version >= 0 and self._writers.get(member.stage) == member.name

    def replace_lost(self, usable: list[Member]) -> None:
        """A writer that is gone, or is on another stage by now, is replaced by another of its stage."""
        serving = {(member.stage, member.name) for member in usable}
        for member in usable:
            if (member.stage, self._writers.get(member.stage)) not in serving:
                self._writers[member.stage] = member.name

    def complete(self, members: Iterable[Member], epoch: int, stages: int) -> bool:
        """Whether every stage is stored."""
        return (
            len({member.stage for member in members if member.worker and member.epoch == epoch and member.stored == self.version}) == stages
        )
