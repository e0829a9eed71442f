"""Silence: who is not heard any more and who is back, to be told. Nothing is decided by it."""

from collections.abc import Iterator

from atoll.control.happenings import Returned, Silent
from atoll.control.membership import Members

__all__ = ["Silence"]


class Silence:
    """Those not heard lately."""

    def __init__(self) -> None:
        self._silent: dict[str, int] = {}  # incarnations, by name

    def look(self, members: Members, now: float) -> Iterator[Silent | Returned]:
        """What has changed."""
        for member in members:
            if members.heard(member, now):
                if self._silent.pop(member.name, None) == member.incarnation:
                    yield Returned(member.name, member.stage)
            elif self._silent.get(member.name) != member.incarnation:
                self._silent[member.name] = member.incarnation
                yield Silent(member.name, member.stage, now - member.heard_at)
