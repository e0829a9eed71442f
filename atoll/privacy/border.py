"""What may leave a site: the rule of the cluster file as a pure check, and the guard that a fabric asks about every tensor.

A method of a service declares what its messages carry (`@carries` of `atoll.fabric.service`); both ends know it from the method, not from
one another. Where a site's `may_send` names kinds, what is of another kind, or of none, is refused: by its own fabric before a byte is
handed to the connection, and by the receiver's before the service sees it.
"""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import msgspec

from atoll.cluster import Cluster
from atoll.errors import AtollError, RefusedError
from atoll.privacy.audit_log import AuditLog

__all__ = ["PLAIN_BYTES", "RELAYED", "BorderGuard", "BorderRules", "Content", "Passage", "SiteBorder"]

PLAIN_BYTES = 64 * 1024
"""Up to this a message without tensors is talk, which no rule is about; longer ones must be declared like tensors."""

RELAYED = "relayed"
"""Bytes of a connection between two others. Nobody here can read them; what is in them is checked, and logged, at its two ends."""

_UNDECLARED = "undeclared"


class Content(msgspec.Struct, frozen=True):
    """What a message carries: one of `CONTENT_KINDS`, what it is called, and how its tensors are encoded."""

    kind: str
    name: str = ""
    codec: str = "none"


class Passage(msgspec.Struct, frozen=True):
    """A message with tensors, about to leave or just arrived. `content` is None where nobody declared any."""

    direction: Literal["out", "in"]
    peer: str
    content: Content | None
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each
    bytes: int


BorderGuard: TypeAlias = Callable[[Passage], None]
"""Asked in the fabric's loop about every passage; RefusedError: it must not be."""


class BorderRules(msgspec.Struct, frozen=True):
    """Which kinds each site may send to others; None: all."""

    may_send: Mapping[str, tuple[str, ...] | None]

    @classmethod
    def of(cls, cluster: Cluster) -> "BorderRules":
        """What a cluster file says."""
        return cls({site.name: site.may_send for site in cluster.sites})

    def why_not(self, kind: str | None, sender: str | None, receiver: str | None) -> str | None:
        """Why something may not go from one site to another; None: it may. A site or a kind that is not known is None."""
        if sender == receiver and sender is not None:
            return None
        if sender is None or sender not in self.may_send:
            if all(kinds is None for kinds in self.may_send.values()):
                return None
            named = "" if sender is None else f" ({sender!r})"
            return f"its sender is of no site the cluster file knows{named}, so nothing says what it may send"
        kinds = self.may_send[sender]
        if kinds is None or kind == RELAYED or kind in kinds:
            return None
        rule = f"site {sender!r} may send {'only ' + ', '.join(kinds) if kinds else 'nothing'} (may_send in the cluster file)"
        return f"{rule}, and this is {kind}" if kind is not None else f"{rule}, and nothing declares what this is"


class SiteBorder:
    """The guard of one process: it lets pass what the rules allow, and writes down what passed and what was refused.

    `site_of` tells the site of a peer by its name. What stays inside a site is neither checked nor written. Where the log cannot be
    written nothing passes.
    """

    def __init__(self, rules: BorderRules, site: str, site_of: Callable[[str], str | None], log: AuditLog | None = None) -> None:
        self._rules, self._site, self._site_of, self._log = rules, site, site_of, log

    def __call__(self, passage: Passage) -> None:
        """Raises RefusedError where the passage must not be."""
        there = self._site_of(passage.peer)
        kind = None if passage.content is None else passage.content.kind
        if there == self._site or kind == RELAYED:
            return
        sender, receiver = (self._site, there) if passage.direction == "out" else (there, self._site)
        why = self._rules.why_not(kind, sender, receiver)
        self._write(passage, there, why or "")
        if why is not None:
            name = "" if passage.content is None else passage.content.name
            way = "to" if passage.direction == "out" else "from"
            raise RefusedError(f"{name or 'a message with tensors'} {way} {passage.peer}: {why}")

    def _write(self, passage: Passage, there: str | None, refused: str) -> None:
        if self._log is None:
            return
        content = passage.content or Content(_UNDECLARED)
        try:
            self._log.append(
                direction=passage.direction,
                site=self._site,
                peer=passage.peer,
                peer_site=there,
                kind=content.kind,
                name=content.name,
                codec=content.codec,
                tensors=passage.tensors,
                bytes=passage.bytes,
                refused=refused,
            )
        except AtollError as error:
            raise RefusedError(f"what crosses the border of {self._site} must be logged first, and cannot be: {error}") from None
