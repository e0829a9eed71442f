"""Conditions: which faults of the network are in force in a lab, and what they mean for a host's interface and for a link. Pure."""

import msgspec

from atoll.cluster import Cluster
from atoll.lab.faults import Fault, FaultKind

__all__ = ["Conditions", "InForce"]


class InForce(msgspec.Struct, frozen=True):
    """A fault of the network that has begun and not ended."""

    kind: FaultKind
    places: tuple[str, ...]
    amount: float | None = None


class Conditions(msgspec.Struct, frozen=True):
    """Everything that is in force. Methods return new conditions or say what these mean."""

    in_force: tuple[InForce, ...] = ()

    def after(self, fault: Fault) -> "Conditions":
        """A fault begins, or `restore` ends what is in force at its places. Faults of processes change nothing here."""
        if fault.kind == "restore":
            return Conditions(tuple(one for one in self.in_force if not _ends(fault.places, one.places)))
        if fault.kind in ("kill", "stop", "continue"):
            return self
        return Conditions((*self.without(fault).in_force, InForce(fault.kind, fault.places, fault.amount)))

    def without(self, fault: Fault) -> "Conditions":
        """This one fault is over."""
        return Conditions(tuple(one for one in self.in_force if (one.kind, _key(one)) != (fault.kind, _key(fault))))

    def connected(self, host: str) -> bool:
        """Whether the host's cable is plugged in."""
        return not any(one.kind == "cut" and one.places == (host,) for one in self.in_force)

    def slowdown(self, *places: str) -> float:
        """By what the bandwidth of a host's interface, or of the link of two sites, is divided."""
        return self._amount("slow", places, 1.0)

    def loss(self, *places: str) -> float:
        """The share of packets lost at a host's interface, or on the link of two sites."""
        return self._amount("loss", places, 0.0)

    def blocked(self, cluster: Cluster) -> frozenset[tuple[str, str]]:
        """Pairs of places (from, to) between which nothing passes."""
        sites = [site.name for site in cluster.sites]
        pairs: set[tuple[str, str]] = set()
        for one in self.in_force:
            if one.kind == "one-way-cut":
                pairs.add((one.places[0], one.places[1]))
            elif one.kind == "cut" and len(one.places) == 2:
                pairs |= {(one.places[0], one.places[1]), (one.places[1], one.places[0])}
            elif one.kind == "cut" and one.places[0] in sites:
                others = [site for site in sites if site != one.places[0]]
                pairs |= {(one.places[0], other) for other in others} | {(other, one.places[0]) for other in others}
        return frozenset(pairs)

    def _amount(self, kind: FaultKind, places: tuple[str, ...], default: float) -> float:
        found = [one.amount for one in self.in_force if one.kind == kind and set(one.places) == set(places)]
        return default if not found or found[0] is None else found[0]


def _key(fault: Fault | InForce) -> tuple[str, ...]:
    return fault.places if fault.kind == "one-way-cut" else tuple(sorted(fault.places))


def _ends(restored: tuple[str, ...], places: tuple[str, ...]) -> bool:
    """Restoring nothing in particular ends all; one place: whatever concerns it; two: what is between them."""
    if len(restored) == 2:
        return set(restored) == set(places)
    return not restored or restored[0] in places
