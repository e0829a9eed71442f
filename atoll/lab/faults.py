"""Fault: what goes wrong in a lab, where, when and for how long. A small language: it prints as it is written, and is checked before
anything runs. Pure.

```
30s kill rome-0 for 10s          every process of the host is killed; after 10 s it boots, and what `atoll lab --all` ran starts anew
30s stop rome-0 for 5s           its processes are stopped (SIGSTOP); `continue` lets them go on
30s cut rome-0                   its cable is pulled; `cut rome` cuts a site off, `cut oslo rome` two sites or hosts from each other
30s one-way-cut oslo-0 rome-0    nothing arrives at rome-0 from oslo-0; the other direction works
30s slow oslo rome 10            the link has a tenth of its bandwidth; also of one host's interface
30s loss rome-0 1%               so many packets are lost; also on the link of two sites
60s restore oslo rome            ends what is in force there; `restore` alone ends everything
```

In TOML the same: `[[fault]]` with `at`, `kind`, `host`, `between` or `from` and `to`, `factor` or `share`, `duration`.

`Conditions` are the faults of the network in force, and what they mean for a host's interface and for a link. Pure.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec

from atoll.cluster import Cluster
from atoll.errors import LabError
from atoll.units import exact_seconds, parse_seconds

__all__ = ["Conditions", "FaultKind", "LabFault", "check_fault", "load_faults", "parse_fault", "parse_faults"]

FaultKind: TypeAlias = Literal["kill", "stop", "continue", "cut", "one-way-cut", "slow", "loss", "restore"]

_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
_EXAMPLE = "'30s cut rome-0 for 5s'"
_PLACES = {"kill": (1, 1), "stop": (1, 1), "continue": (1, 1), "cut": (1, 2), "one-way-cut": (2, 2), "slow": (1, 2), "loss": (1, 2)}
_LASTING = ("kill", "stop", "cut", "one-way-cut", "slow", "loss")
_KEYS = ("at", "kind", "host", "site", "between", "from", "to", "factor", "share", "duration")


class LabFault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that goes wrong `at_seconds` after the lab's command began. `places` are names of hosts or sites."""

    kind: FaultKind
    places: tuple[str, ...] = ()
    at_seconds: float = 0.0
    amount: float | None = None  # slow: the factor; loss: the share
    duration_seconds: float | None = None  # None: until it is restored

    def __str__(self) -> str:
        """As `parse_fault` reads it."""
        words = [_time(self.at_seconds), *self.words]
        return " ".join(words + (["for", _time(self.duration_seconds)] if self.duration_seconds is not None else []))

    @property
    def words(self) -> tuple[str, ...]:
        """What and where, without times."""
        amount = () if self.amount is None else (repr(self.amount),)
        return (self.kind, *self.places, *amount)


def _time(seconds: float) -> str:
    return exact_seconds(seconds).replace(" ", "")


def parse_fault(text: str, cluster: Cluster) -> LabFault:
    """`"30s cut rome-0 for 5s"`; LabError says what is wrong with it."""
    words = text.split()
    try:
        if len(words) < 2:
            raise LabError(f"write it like {_EXAMPLE}")
        duration = None
        if "for" in words:
            words, rest = words[: words.index("for")], words[words.index("for") + 1 :]
            duration = _seconds("".join(rest), "the duration")
        kind = _kind(words[1])
        places = words[2:]
        amount = _amount(kind, places.pop()) if kind in ("slow", "loss") and places else None
        fault = LabFault(
            at_seconds=_seconds(words[0], "the first word, when it happens,"),
            kind=kind,
            places=tuple(places),
            amount=amount,
            duration_seconds=duration,
        )
        check_fault(fault, cluster)
    except LabError as error:
        raise LabError(f"fault {text!r}: {error}") from None
    return fault


def load_faults(path: str | Path, cluster: Cluster) -> tuple[LabFault, ...]:
    """The faults of a TOML file, in the order of time."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_faults(text, cluster, str(path))


def parse_faults(text: str, cluster: Cluster, where: str = "faults") -> tuple[LabFault, ...]:
    """The faults a text in TOML describes, in the order of time."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise LabError(f"{where}: not valid TOML: {error}") from None
    entries = document.get("fault", [])
    if set(document) - {"fault"} or not isinstance(entries, list):
        raise LabError(f"{where}: only [[fault]] tables are known there")
    faults = []
    for number, entry in enumerate(entries, start=1):
        try:
            faults.append(_from_table(entry))
            check_fault(faults[-1], cluster)
        except LabError as error:
            raise LabError(f"{where}: fault {number}: {error}") from None
    return tuple(sorted(faults, key=lambda fault: fault.at_seconds))


def _from_table(entry: object) -> LabFault:
    if not isinstance(entry, Mapping):
        raise LabError("must be a table [[fault]]")
    for key in entry:
        if key not in _KEYS:
            raise LabError(f"unknown key {key!r}; known: {', '.join(_KEYS)}")
    for needed in ("at", "kind"):
        if needed not in entry:
            raise LabError(f"{needed} is missing")
    kind = _kind(str(entry["kind"]))
    amounts = [_amount(kind, str(entry[key])) for key in ("factor", "share") if key in entry]
    if len(amounts) > 1:
        raise LabError("factor is for slow and share for loss; give one")
    return LabFault(
        at_seconds=_seconds(entry["at"], "at"),
        kind=kind,
        places=_table_places(entry),
        amount=amounts[0] if amounts else None,
        duration_seconds=_seconds(entry["duration"], "duration") if "duration" in entry else None,
    )


def _table_places(entry: Mapping[str, object]) -> tuple[str, ...]:
    given = [key for key in ("host", "site", "between", "from") if key in entry]
    if len(given) > 1 or ("from" in entry) != ("to" in entry):
        raise LabError("say where once: host, site, between, or from and to")
    if "from" in entry:
        return str(entry["from"]), str(entry["to"])
    value = entry[given[0]] if given else ()
    if given == ["between"] and (not isinstance(value, list) or len(value) != 2):
        raise LabError("between must name two, like ['oslo', 'rome']")
    return tuple(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else (str(value),)


def _kind(word: str) -> FaultKind:
    for kind in _KINDS:
        if word.lower().replace(" ", "-").replace("_", "-") == kind:
            return kind
    raise LabError(f"no kind of fault is called {word!r}; there are {', '.join(_KINDS)}")


def _amount(kind: FaultKind, word: str) -> float:
    try:
        return float(word[:-1]) / 100 if word.endswith("%") else float(word)
    except ValueError:
        raise LabError(f"{kind} needs {'a factor such as 10' if kind == 'slow' else 'a share such as 1%'}, not {word!r}") from None


def _seconds(text: object, what: str) -> float:
    if not isinstance(text, str):
        raise LabError(f"{what} must be a time as text, like '30s', got {text!r}")
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise LabError(f"{what}: {error}") from None
    if seconds < 0:
        raise LabError(f"{what} must not be negative, got {text}")
    return seconds


def check_fault(fault: LabFault, cluster: Cluster) -> None:
    """LabError unless the fault makes sense in this cluster."""
    hosts, sites = {host.name for host in cluster.hosts}, {site.name for site in cluster.sites}
    for place in fault.places:
        if place not in hosts | sites:
            raise LabError(f"the cluster has no host or site {place!r}; hosts: {_some(hosts)}; sites: {_some(sites)}")
    least, most = _PLACES.get(fault.kind, (0, 2))
    if not least <= len(fault.places) <= most or len(set(fault.places)) != len(fault.places):
        counts = str(least) if least == most else f"{least} or {most}"
        raise LabError(f"{fault.kind} needs the names of {counts} different hosts or sites, got {len(fault.places)}")
    _check_links(fault, sites)
    _check_amount(fault)
    if fault.duration_seconds is not None and fault.kind not in _LASTING:
        raise LabError(f"{fault.kind} has no duration")


def _check_links(fault: LabFault, sites: set[str]) -> None:
    if fault.kind not in ("slow", "loss"):
        return
    of_sites = [place in sites for place in fault.places]
    if of_sites not in ([False], [True, True]):
        raise LabError(f"{fault.kind} is of one host's interface or of the link of two sites, not of {' and '.join(fault.places)}")


def _check_amount(fault: LabFault) -> None:
    if fault.kind == "slow" and not (fault.amount is not None and 1e-3 <= fault.amount <= 1e6):
        raise LabError("slow needs a factor by which the bandwidth is divided, such as 10")
    if fault.kind == "loss" and not (fault.amount is not None and 0 <= fault.amount <= 1):
        raise LabError("loss needs a share of packets from 0 to 1, such as 1%")
    if fault.kind not in ("slow", "loss") and fault.amount is not None:
        raise LabError(f"{fault.kind} takes no number")


def _some(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:8]) + (" …" if len(shown) > 8 else "")


class InForce(msgspec.Struct, frozen=True):
    """A fault of the network that has begun and not ended."""

    kind: FaultKind
    places: tuple[str, ...]
    amount: float | None = None


class Conditions(msgspec.Struct, frozen=True):
    """Everything that is in force. Methods return new conditions or say what these mean."""

    in_force: tuple[InForce, ...] = ()

    def after(self, fault: LabFault) -> "Conditions":
        """A fault begins, or `restore` ends what is in force at its places. Faults of processes change nothing here."""
        if fault.kind == "restore":
            return Conditions(tuple(one for one in self.in_force if not _ends(fault.places, one.places)))
        if fault.kind in ("kill", "stop", "continue"):
            return self
        return Conditions((*self.without(fault).in_force, InForce(fault.kind, fault.places, fault.amount)))

    def without(self, fault: LabFault) -> "Conditions":
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


def _key(fault: LabFault | InForce) -> tuple[str, ...]:
    return fault.places if fault.kind == "one-way-cut" else tuple(sorted(fault.places))


def _ends(restored: tuple[str, ...], places: tuple[str, ...]) -> bool:
    """Restoring nothing in particular ends all; one place: whatever concerns it; two: what is between them."""
    if len(restored) == 2:
        return set(restored) == set(places)
    return not restored or restored[0] in places
