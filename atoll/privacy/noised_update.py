"""Clipped and noised updates: what a site sends differs little, by what is accounted for, from what it would have sent without its data.

    sent = clip(update, C) + N(0, (z·C)²)        C: `norm`, z: `multiplier`

Noise comes from ChaCha20 under a key that only the site has, by the update's name and its bytes: an update that is sent again has the same
noise again, another one never. Update and noise are rounded to multiples of a grid before they are added, so that the last bits of a sum
say nothing of what was added (Mironov, "On significance of the least significant bits for differential privacy", 2012): a rounded update
and rounded noise add up to the rounded sum of the update and Gaussian noise. The clip leaves room for what rounding adds to a norm.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from atoll.errors import AtollError, NonFiniteTensorError
from atoll.privacy.mask_stream import derive

__all__ = ["NoiseLedger", "NoiseTerms", "clip_factor", "gaussian", "noised", "noise_update", "update_norm_squared"]

_PIECE = 1 << 16  # normal numbers that are drawn together
_GRID_BITS = 30  # a grid is so many powers of two finer than the noise


class NoiseTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How updates are clipped and noised."""

    norm: float  # C: the largest an update may be
    multiplier: float  # z: the noise's standard deviation over C

    def __post_init__(self) -> None:
        if not (0 < self.norm < math.inf and 0 < self.multiplier < math.inf and 0 < self.deviation < math.inf):
            raise AtollError(
                f"updates are clipped to a positive norm and noised by a positive multiple of it, got {self.norm}, {self.multiplier}"
            )

    @property
    def deviation(self) -> float:
        """The noise's standard deviation."""
        return self.norm * self.multiplier

    @property
    def grid(self) -> float:
        """What everything that is sent is a multiple of, before it is rounded to fp32."""
        return 2.0 ** (math.floor(math.log2(self.deviation)) - _GRID_BITS)


def update_norm_squared(update: torch.Tensor) -> float:
    """The square of an update's norm, in double precision: shards of one update add up."""
    return float(torch.linalg.vector_norm(update.detach().reshape(-1), dtype=torch.float64)) ** 2


def clip_factor(squared: float, elements: int, terms: NoiseTerms) -> float:
    """What an update of this squared norm, all shards together, is multiplied by. NonFiniteTensorError where that is not a number."""
    if not math.isfinite(squared):
        raise NonFiniteTensorError("an update that is not finite cannot be clipped; leave the round out")
    room = terms.norm - terms.grid * math.sqrt(elements) / 2
    if room < 0.9 * terms.norm:
        raise AtollError(
            f"a noise multiplier of {terms.multiplier} is too coarse for {elements} elements: rounding would take part of the norm"
        )
    norm = math.sqrt(squared)
    return 1.0 if norm <= room else room * (1 - 2.0**-40) / norm


class NoiseLedger:
    """Which updates of a site were noised: each once. `key` is 32 secret bytes; kept with the site's own checkpoint, an update that is made
    again after a restart has the same noise. `drawn` is what the accountant counts, over the whole run: keep it with the key."""

    def __init__(self, key: bytes, drawn: int = 0) -> None:
        assert len(key) == 32
        self._key, self.drawn = key, drawn
        self._last: dict[str, bytes] = {}

    def draw(self, update: str, digest: bytes) -> bytes:
        """The seed of an update's noise. AtollError where the name was another update's: one name is one release, and is counted once."""
        before = self._last.get(update)
        if before is None:
            self._last[update] = digest
            self.drawn += 1
        elif before != digest:
            raise AtollError(
                f"update {update} was noised with other values before; what is sent anew is another update, with a name of its own"
            )
        return derive(self._key, ("noise of an update", update, digest))

    def forget(self, update: str) -> None:
        """Its round is over: it is not sent again. It stays counted."""
        self._last.pop(update, None)


def gaussian(seed: bytes, shard: int, elements: int) -> Iterator[npt.NDArray[np.float64]]:
    """Standard normal numbers, piece by piece: two from every 16 bytes of a stream, by Box and Muller; none is beyond 8.6."""
    key = derive(seed, ("normal numbers", str(shard)))
    for piece, start in enumerate(range(0, elements, _PIECE)):
        count = min(_PIECE, elements - start)
        pairs = -(-count // 2)
        nonce = bytes(4) + piece.to_bytes(12, "little")
        stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(16 * pairs))
        drawn = (np.frombuffer(stream, dtype="<u8") >> np.uint64(11)).astype(np.float64).reshape(2, pairs)
        radius = np.sqrt(-2 * np.log((drawn[0] + 1) * 2.0**-53))
        angle = drawn[1] * (2 * math.pi * 2.0**-53)
        yield np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]


def noised(shard: torch.Tensor, factor: float, terms: NoiseTerms, seed: bytes, number: int) -> torch.Tensor:
    """One shard of an update, times its `clip_factor`, with its noise, in fp32: a new flat tensor. `number` is which shard it is."""
    flat, grid = shard.detach().reshape(-1).cpu(), terms.grid
    out = np.empty(flat.numel(), dtype=np.float32)
    for piece, normal in enumerate(gaussian(seed, number, len(out))):
        place = slice(piece * _PIECE, piece * _PIECE + len(normal))
        values = np.rint(flat[place].double().numpy() * (factor / grid)) + np.rint(normal * (terms.deviation / grid))
        out[place] = values * grid  # whole numbers below 2^53: exact up to here
    return torch.from_numpy(out)


def noise_update(update: str, shards: Sequence[torch.Tensor], terms: NoiseTerms, ledger: NoiseLedger) -> list[torch.Tensor]:
    """An update as it may be sent, all its shards together; asked again for the same update it is the same to the bit."""
    factor = clip_factor(math.fsum(map(update_norm_squared, shards)), sum(shard.numel() for shard in shards), terms)
    digest = hashlib.sha256(msgspec.json.encode((terms, [(str(shard.dtype), list(shard.shape)) for shard in shards])))
    for shard in shards:
        digest.update(shard.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy().data)
    seed = ledger.draw(update, digest.digest())
    return [noised(shard, factor, terms, seed, number).view(shard.shape) for number, shard in enumerate(shards)]
