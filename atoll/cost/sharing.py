"""Links that several senders share: how long a transfer holds one.

Flows that cross a link at once get equal parts of it, and the replicas of a pipeline send at about the same times: so a transfer takes as
long as one of each of those that use its link, of those that use it less often in proportion. The busiest sender then holds the link for
exactly as long as all transfers of the step need.
"""

from collections.abc import Hashable

__all__ = ["SharedLinks"]


class SharedLinks:
    """Who uses which link, and how often in a step."""

    def __init__(self) -> None:
        self._users: dict[Hashable, dict[int, float]] = {}  # by link: seconds of one transfer of each user, by how often they use it
        self._known: dict[tuple[Hashable, int], float] = {}

    def add(self, link: Hashable, times: int, seconds: float) -> None:
        """A user whose transfers take `seconds` alone, or several that together do; each sends `times`."""
        users = self._users.setdefault(link, {})
        users[times] = users.get(times, 0.0) + seconds

    def occupancy(self, link: Hashable, times: int) -> float:
        """How long a transfer of one who uses a link so often holds it."""
        found = self._known.get((link, times))
        if found is None:
            users = self._users[link].items()
            found = sum([seconds if theirs >= times else seconds * theirs / times for theirs, seconds in users])
            self._known[link, times] = found
        return found
