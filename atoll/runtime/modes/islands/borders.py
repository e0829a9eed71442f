"""What sites of a run may send one another: the cluster file's `may_send` as the coordinator and the gateways keep it (docs/privacy.md).

Where no site of a run has a rule nothing is asked or written. Else every process that talks to other sites has a guard, at both ends of
every connection, and a log in RUN/audit. The coordinator counts as the first site's, as the run's checkpoint does.
"""

import re
from collections.abc import Mapping, Sequence

from atoll.cluster import Cluster
from atoll.control.messages import Message
from atoll.control.rounds.messages import GlobalChunk, RoundAnnounce, SiteBeat, UpdateChunk
from atoll.errors import ClusterError
from atoll.privacy.audit_log import AuditLog
from atoll.privacy.border import BorderRules, Content, SiteBorder
from atoll.runtime.modes.islands.chunks import unpacked
from atoll.runtime.modes.swarm.transport import COORDINATOR
from atoll.runtime.run_directory import RunDirectory

__all__ = ["IslandBorders", "content_of_round"]

_OF_PROCESS = re.compile(r"(?:-r\d+)?(?:-\d+)?")  # what follows a site's name in a process's: of which start of the run, and which restart


def content_of_round(message: Message) -> Content | None:
    """What a message between sites carries. The words of the protocol are about updates: what they weigh, and their losses."""
    if isinstance(message, UpdateChunk):
        site, incarnation, number = message.update
        return Content("updates", f"{site}.{incarnation}.{number} chunk {message.chunk}", unpacked(message.payload).header.codec)
    if isinstance(message, GlobalChunk):
        epoch, round = message.position
        return Content("states", f"state {epoch}.{round} chunk {message.chunk}")
    if isinstance(message, SiteBeat | RoundAnnounce):
        return Content("updates", "offers of updates")
    return None


class IslandBorders:
    """The rules of the sites of a run."""

    def __init__(self, may_send: Mapping[str, tuple[str, ...] | None]) -> None:
        """Of each site, as a spec has it; of none where no site has a rule."""
        self.sites = tuple(may_send)
        self._rules = BorderRules(may_send)
        self.watched = any(kinds is not None for kinds in may_send.values())

    @classmethod
    def of(cls, cluster: Cluster, sites: Sequence[str]) -> "IslandBorders":
        """As a cluster file says."""
        said = {site.name: site.may_send for site in cluster.sites}
        return cls({site: said[site] for site in sites})

    @property
    def may_send_by_site(self) -> dict[str, tuple[str, ...] | None]:
        """For a spec."""
        return dict(self._rules.may_send)

    def may_send(self, site: str, kind: str) -> bool:
        """To the others."""
        kinds = self._rules.may_send.get(site)
        return kinds is None or kind in kinds

    def why_not(self, kind: str) -> str | None:
        """Which site may not send it, and what to do; None: all may."""
        site = next((site for site in self.sites if not self.may_send(site, kind)), None)
        if site is None:
            return None
        lacking = f"site {site!r} may send {self._allowed(site)}, and sites need {kind} of each other"
        return f'{lacking}: add "{kind}" to its may_send in the cluster file'

    def gives_states(self, site: str) -> bool:
        """Whether others may have the common state from a site."""
        return self.may_send(site, "states")

    def check(self, needed: str, restarts: int) -> None:
        """ClusterError where sites may not send what a run needs: this kind of each, and states of one where sites come back."""
        if not self.watched:
            return
        for one in self.sites:
            twin = next((other for other in self.sites if other != one and _is_process_of(one, other)), None)
            if twin is not None:
                raise ClusterError(
                    f"sites {one!r} and {twin!r}: a process of the first that is started again would have a name of the second, and "
                    "what may leave which could not be told (may_send); call one of them otherwise"
                )
        if (lacking := self.why_not(needed)) is not None:
            raise ClusterError(f"mode islands: {lacking}, or leave the site out of the plan")
        if restarts and (stateless := self.why_no_state()) is not None:
            raise ClusterError(f"--max-restarts: who comes back needs the common state of another site, and {stateless}, or leave it out")

    def why_no_state(self, site: str | None = None) -> str | None:
        """Why nobody, or nobody but `site`, may give others the common state, and what to do; None: somebody may."""
        others = [other for other in self.sites if other != site]
        if any(map(self.gives_states, others)):
            return None
        said = "; ".join(f"site {other!r} may send {self._allowed(other)}" for other in others)
        return f'{said}: add "states" to the may_send of one of them in the cluster file'

    def check_kept(self, kept: Sequence[str]) -> None:
        """ClusterError where a run cannot go on since what only these sites have kept of the common state may not leave them."""
        lacking = [site for site in self.sites if site not in kept]
        if kept and lacking and not any(map(self.gives_states, kept)):
            said = "; ".join(f"site {site!r} may send {self._allowed(site)}" for site in kept)
            raise ClusterError(
                f"site {lacking[0]!r} has kept nothing of the common state, which it needs of another, and {said}; "
                'add "states" to the may_send of one of them in the cluster file'
            )

    def guard(self, run: RunDirectory, site: str, process: str) -> SiteBorder | None:
        """The guard of one process, with its log; None where no site has a rule."""
        if not self.watched:
            return None
        return SiteBorder(self._rules, site, self.site_of, AuditLog(run.audit, process))

    def site_of(self, process: str) -> str | None:
        """The site of a process, by its name."""
        if process == COORDINATOR:
            return self.sites[0]
        return next((site for site in self.sites if _is_process_of(process, site)), None)

    def _allowed(self, site: str) -> str:
        kinds = self._rules.may_send.get(site)
        return f"only {', '.join(kinds)}" if kinds else "nothing"


def _is_process_of(process: str, site: str) -> bool:
    return process.startswith(site) and _OF_PROCESS.fullmatch(process[len(site) :]) is not None
