"""Who may take part in a run and what each may do: a run's own authority, join tokens, certificates, roles. docs/security.md.

Everything is loaded when it is first asked for, so that tokens and addresses are looked at before PyTorch is loaded.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.fabric.security.authority import Authority
    from atoll.fabric.security.credentials import Credentials
    from atoll.fabric.security.enrolment import enrol
    from atoll.fabric.security.member import RunMember, serve

__all__ = [
    "Authority",
    "Credentials",
    "RunMember",
    "enrol",
    "serve",
]

_HOME = {
    "Authority": "atoll.fabric.security.authority",
    "Credentials": "atoll.fabric.security.credentials",
    "RunMember": "atoll.fabric.security.member",
    "enrol": "atoll.fabric.security.enrolment",
    "serve": "atoll.fabric.security.member",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'atoll.fabric.security' has no attribute {name!r}")
