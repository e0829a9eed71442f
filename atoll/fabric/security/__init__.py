"""Who may take part in a run and what each may do: a run's own authority, join tokens, certificates, roles. docs/security.md.

Everything is loaded when it is first asked for, so that a token can be looked at before PyTorch is loaded.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.fabric.fingerprint import job_fingerprint
    from atoll.fabric.security.authority import Authority
    from atoll.fabric.security.certificates import ROLES, Identity, Role
    from atoll.fabric.security.credentials import Credentials
    from atoll.fabric.security.enrolment import enrol
    from atoll.fabric.security.member import RunMember, serve
    from atoll.fabric.security.token import Token
    from atoll.fabric.service import allowed

__all__ = [
    "ROLES",
    "Authority",
    "Credentials",
    "Identity",
    "RunMember",
    "Role",
    "Token",
    "allowed",
    "enrol",
    "job_fingerprint",
    "serve",
]

_HOME = {
    "ROLES": "atoll.fabric.security.certificates",
    "Authority": "atoll.fabric.security.authority",
    "Credentials": "atoll.fabric.security.credentials",
    "Identity": "atoll.fabric.security.certificates",
    "RunMember": "atoll.fabric.security.member",
    "Role": "atoll.fabric.security.certificates",
    "Token": "atoll.fabric.security.token",
    "allowed": "atoll.fabric.service",
    "enrol": "atoll.fabric.security.enrolment",
    "job_fingerprint": "atoll.fabric.fingerprint",
    "serve": "atoll.fabric.security.member",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'atoll.fabric.security' has no attribute {name!r}")
