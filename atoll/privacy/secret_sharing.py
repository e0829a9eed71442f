"""Shamir's secret sharing of 32 bytes: any `threshold` shares give the secret, fewer say nothing about it.

A polynomial of degree threshold - 1 over the integers modulo the prime 2^256 + 297, whose constant term is the secret; a share is its value
at the holder's number, from 1 on. `cryptography` has no secret sharing; everything else secret comes from it.
"""

from collections.abc import Callable, Mapping

from atoll.errors import AtollError

__all__ = ["SECRET_BYTES", "SHARE_BYTES", "join_shares", "split_secret"]

_PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
_DRAWN_BYTES = 56  # 191 bits more than the prime has: what the remainder prefers is of no use to anybody


def split_secret(secret: bytes, threshold: int, holders: int, random: Callable[[int], bytes]) -> list[bytes]:
    """The shares of holders 1, 2, …; `random` gives so many bytes that nobody can foretell."""
    assert len(secret) == SECRET_BYTES
    assert 1 <= threshold <= holders < 2**16
    drawn = [int.from_bytes(random(_DRAWN_BYTES)) % _PRIME for _ in range(threshold - 1)]
    return [_value([int.from_bytes(secret), *drawn], number).to_bytes(SHARE_BYTES) for number in range(1, holders + 1)]


def _value(coefficients: list[int], place: int) -> int:
    found = 0
    for coefficient in reversed(coefficients):
        found = (found * place + coefficient) % _PRIME
    return found


def join_shares(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from the shares of at least `threshold` holders by their numbers. AtollError where they are no shares of one.

    A wrong share gives another secret: compare what comes out with something that was said of it before.
    """
    if len(shares) < threshold:
        raise AtollError(f"{len(shares)} shares of a secret that {threshold} are needed for")
    chosen = sorted(shares)[:threshold]
    secret = 0
    for number in chosen:
        value = int.from_bytes(shares[number])
        if len(shares[number]) != SHARE_BYTES or value >= _PRIME:
            raise AtollError(f"what holder {number} gave is no share")
        above = below = 1
        for other in chosen:
            if other != number:
                above = above * other % _PRIME
                below = below * (other - number) % _PRIME
        secret = (secret + value * above * pow(below, -1, _PRIME)) % _PRIME
    if secret >= 2**256:
        raise AtollError("the shares are of no secret: one of them is wrong")
    return secret.to_bytes(SECRET_BYTES)
