"""Who may take part in a run and what each may do: a run's own authority, join tokens, certificates, roles. docs/security.md."""

from atoll.fabric.fingerprint import job_fingerprint
from atoll.fabric.roles import allowed
from atoll.fabric.security.authority import Authority
from atoll.fabric.security.credentials import Credentials
from atoll.fabric.security.enrolment import enrol
from atoll.fabric.security.identity import ROLES, Identity, Role
from atoll.fabric.security.member import Member, serve
from atoll.fabric.security.token import Token

__all__ = [
    "ROLES",
    "Authority",
    "Credentials",
    "Identity",
    "Member",
    "Role",
    "Token",
    "allowed",
    "enrol",
    "job_fingerprint",
    "serve",
]
