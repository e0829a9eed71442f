"""Who a member of a run is: its run, role and name, as one URI inside its certificate. What a peer says of itself counts for nothing."""

import re
from typing import Literal, TypeAlias, get_args

import msgspec
from cryptography import x509

from atoll.errors import RefusedError

__all__ = ["ROLES", "Identity", "Role", "check_name", "check_role", "identity_of"]

Role: TypeAlias = Literal["worker", "feeder", "observer", "coordinator"]
ROLES: tuple[Role, ...] = get_args(Role)
"""What a member may be. `coordinator` is never given for a token."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_URI = re.compile(r"atoll://([0-9a-f]{16})/([a-z]+)/([A-Za-z0-9._-]+)")


class Identity(msgspec.Struct, frozen=True):
    """A member: of which run, as what, under which name."""

    run: str  # the digest of its authority's key
    role: Role
    name: str

    @property
    def uri(self) -> str:
        """As it stands in a certificate."""
        return f"atoll://{self.run}/{self.role}/{self.name}"


def check_name(name: str) -> str:
    """A name a member may have; RefusedError if not."""
    if not _NAME.fullmatch(name):
        raise RefusedError(f"{name[:80]!r} is no name for a member: use up to 63 letters, digits, '.', '_', '-', a letter or digit first")
    return name


def check_role(role: str) -> Role:
    """A role there is; RefusedError if not."""
    for known in ROLES:
        if role == known:
            return known
    raise RefusedError(f"{role[:80]!r} is no role; there are {', '.join(ROLES)}")


def identity_of(certificate: x509.Certificate) -> Identity:
    """What a certificate says; RefusedError if it is not a member's. Its signature was checked by TLS."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    found = _URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if found is None:
        raise RefusedError("its certificate does not say which member of which run it is for")
    return Identity(found[1], check_role(found[2]), check_name(found[3]))
