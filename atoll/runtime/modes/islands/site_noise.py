"""A site's clipped and noised updates: its secret key and how many it has made are on its disk before one of them leaves.

    d = noised(g − θ) + β·e        what a codec left out, e, is of noised updates: sending it again costs no privacy

Losses say something of the data too and are not noised: offers carry none, and the run's are the first site's, which the coordinator is of.
"""

import os
import secrets
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from atoll.privacy.noised_update import NoiseLedger, NoiseTerms, noise_update
from atoll.runtime.checkpoint.safetensors_file import sync_directory
from atoll.runtime.modes.islands.noise import Noise, NoiseRecord, noise_path, read_noise
from atoll.runtime.run_directory import RunDirectory

__all__ = ["SiteNoise"]


class SiteNoise:
    """Of one site, in the process that makes its updates."""

    def __init__(self, directory: RunDirectory, site: str, noise: Noise, random: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._path, self._noise, self._last = noise_path(directory, site), noise, ""
        self._terms = NoiseTerms(norm=noise.norm, multiplier=noise.multiplier)
        before = read_noise(directory, site)
        key, drawn = (random(32), 0) if before is None else (bytes.fromhex(before.key), before.drawn)
        self._key, self._ledger = key, NoiseLedger(key, drawn)
        self._write()

    def noised(self, update: str, shards: Sequence[Tensor]) -> list[Tensor]:
        """The update as it may be sent. That it was made is on the disk when this comes back."""
        self._ledger.forget(self._last)
        self._last = update
        found = noise_update(update, shards, self._terms, self._ledger)
        self._write()
        return found

    def _write(self) -> None:
        record = NoiseRecord(key=self._key.hex(), drawn=self._ledger.drawn, noise=self._noise)
        temporary = self._path.with_suffix(".tmp")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, msgspec.json.encode(record))
            os.fsync(file)
        finally:
            os.close(file)
        temporary.replace(self._path)
        sync_directory(self._path.parent)
