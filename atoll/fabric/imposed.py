"""Links imposed on a process from outside: a file named in its environment says what the way to each peer has as bandwidth and latency.

This is how a lab without network namespaces reaches the fabric of its processes: `ATOLL_LINKS` names the file, and
`imposed_links(os.environ)` reads it.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from atoll.errors import FabricError
from atoll.fabric.shaped import ShapedLink

__all__ = ["LINKS", "ImposedLink", "ImposedLinks", "LinkChoice", "imposed_links"]

LINKS = "ATOLL_LINKS"


class ImposedLink(msgspec.Struct, frozen=True):
    """The way to a peer; those of one name share their bandwidth."""

    name: str
    bytes_per_s: float
    latency_s: float


class ImposedLinks(msgspec.Struct, frozen=True):
    """All of them, by the peer's address, and the address this process has itself."""

    source: str
    peers: dict[str, ImposedLink]


class LinkChoice:
    """The shaped link for each peer of this process. Connections of one link share it."""

    def __init__(self, links: ImposedLinks) -> None:
        self._source = links.source
        self._peers = links.peers
        self._shaped = {link.name: ShapedLink(link.bytes_per_s, link.latency_s) for link in links.peers.values()}

    def link_to(self, address: str) -> ShapedLink | None:
        """For a peer with this address, without port; None: not a peer that something is imposed on."""
        found = self._peers.get(address)
        return None if found is None else self._shaped[found.name]

    def source_for(self, address: str) -> tuple[str, int] | None:
        """What to dial such a peer from, so that it knows who comes; None: as it happens to be."""
        return (self._source, 0) if address in self._peers else None


def imposed_links(environ: Mapping[str, str]) -> LinkChoice | None:
    """What the environment imposes on this process; None: nothing."""
    path = environ.get(LINKS)
    if not path:
        return None
    try:
        return LinkChoice(msgspec.json.decode(Path(path).read_bytes(), type=ImposedLinks))
    except (OSError, msgspec.DecodeError) as error:
        raise FabricError(f"{path} ({LINKS}): cannot be read: {error}") from None
