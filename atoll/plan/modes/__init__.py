"""The modes there are: Atoll's own, and those that installed packages bring as entry points of the group `atoll.modes`.

An entry point is called as its mode is and names the mode's rules, an object of a class derived from `ModeRules`; the rules say where the
runtime is. Nothing else has to be told of a mode (docs/decisions/0015-modes.md).
"""

from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name

from atoll.errors import PlanError
from atoll.plan.modes.rules import Failures, ModeRules, hosts_of

__all__ = [
    "Failures", "ModeRules", "collaboration_rules", "default_rules", "find_rules", "hosts_of", "installed_modes", "mode_names",
    "mode_rules", "starts_in_first_step",
]  # fmt: skip

_GROUP = "atoll.modes"
_DEFAULT = "lockstep"
_COLLABORATION = "parts"
_OWN = {
    "lockstep": "atoll.plan.modes.lockstep:LOCKSTEP",
    "swarm": "atoll.plan.modes.swarm:SWARM",
    "islands": "atoll.plan.modes.islands:ISLANDS",
    "alone": "atoll.plan.modes.alone:ALONE",
    "parts": "atoll.plan.modes.parts:PARTS",
}


@cache
def _places() -> dict[str, str]:
    """Where each mode's rules are; nobody else's mode takes the place of one of Atoll's own."""
    others = {point.name: point.value for point in entry_points(group=_GROUP)}
    return {**_OWN, **{name: others[name] for name in sorted(others) if name not in _OWN}}


def mode_names() -> tuple[str, ...]:
    """Of all modes, Atoll's own first."""
    return tuple(_places())


@cache
def mode_rules(name: str) -> ModeRules:
    """The rules of a mode; a `PlanError` says which modes there are, or why this one cannot be loaded."""
    if name not in _places():
        raise PlanError(f"there is no mode {name!r}; there are {', '.join(mode_names())}")
    try:
        found = resolve_name(_places()[name])
    except Exception as error:  # somebody else's code
        raise PlanError(f"mode {name}: its rules, {_places()[name]}, cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, ModeRules) or found.name != name:
        raise PlanError(f"mode {name}: {_places()[name]} is not the rules of a mode of this name")
    return found


def find_rules(name: str) -> ModeRules | None:
    """The rules of a mode; None where there are none, as of a run that another installation made."""
    try:
        return mode_rules(name)
    except PlanError:
        return None


def starts_in_first_step(mode: str) -> bool:
    """Whether a mode's first step lasts from the start of the run, so that it tells no speed."""
    rules = find_rules(mode)
    return rules is not None and rules.starts_in_first_step


def default_rules() -> ModeRules:
    """Of the mode that is meant where none is named, and that others must be better than to be chosen."""
    return mode_rules(_DEFAULT)


def collaboration_rules() -> ModeRules:
    """Of the mode that is meant where a script makes a collaboration and no mode is named."""
    return mode_rules(_COLLABORATION)


def installed_modes() -> tuple[ModeRules, ...]:
    """The rules of all modes that can be loaded."""
    return tuple(rules for name in mode_names() if (rules := find_rules(name)) is not None)
