"""What is known of the peers of a collective: how fast each sends and receives, and which of them are near each other."""

import math

import msgspec

from atoll.errors import FabricError

__all__ = ["Network", "PeerRates", "equal_network"]


class PeerRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One peer's interface, as measured. `inside_*`: towards peers of its own site; None where that is the same interface."""

    name: str
    site: str = ""
    up_bytes_per_s: float = 1.0
    down_bytes_per_s: float = 1.0
    inside_up_bytes_per_s: float | None = None
    inside_down_bytes_per_s: float | None = None


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peers, and what the links between sites carry in one direction where several hosts share them: by (from, to)."""

    peers: tuple[PeerRates, ...]
    links_bytes_per_s: dict[tuple[str, str], float] = {}

    def __post_init__(self) -> None:
        names = [peer.name for peer in self.peers]
        if not names or len(set(names)) != len(names):
            raise FabricError(f"a collective needs peers with different names, got {', '.join(names) or 'none'}")
        for peer in self.peers:
            inside = (peer.inside_up_bytes_per_s or 1.0, peer.inside_down_bytes_per_s or 1.0)
            if not all(0 < rate < math.inf for rate in (peer.up_bytes_per_s, peer.down_bytes_per_s, *inside)):
                raise FabricError(f"{peer.name}: rates must be positive and finite, got {peer}")
        for (source, target), rate in self.links_bytes_per_s.items():
            if not 0 < rate < math.inf:
                raise FabricError(f"link {source!r}–{target!r}: the rate must be positive and finite, got {rate}")

    @property
    def sites(self) -> dict[str, list[str]]:
        """Peers by site, in the order given."""
        found: dict[str, list[str]] = {}
        for peer in self.peers:
            found.setdefault(peer.site, []).append(peer.name)
        return found

    def without_sites(self) -> "Network":
        """The same peers, each exchanging with every other directly."""
        flat = tuple(
            msgspec.structs.replace(peer, site="", inside_up_bytes_per_s=None, inside_down_bytes_per_s=None) for peer in self.peers
        )
        return Network(peers=flat)


def equal_network(names: "list[str] | tuple[str, ...]", bytes_per_s: float = 25e6) -> Network:
    """Peers of which nothing is known: all alike."""
    return Network(peers=tuple(PeerRates(name=name, up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s) for name in names))
