"""How a run's updates are clipped and noised, and what each site keeps of those it has noised (docs/privacy.md)."""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.errors import AtollError, JobError
from atoll.plan.modes.islands import IslandsOptions
from atoll.runtime.run_directory import RunDirectory

__all__ = ["Noise", "NoiseRecord", "check_noise", "noise_of", "noise_path", "read_noise"]

_FILE = "noise.json"  # in a site's directory


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's updates are clipped and noised, and the δ that ε is told for."""

    norm: float
    multiplier: float
    delta: float

    @property
    def reason(self) -> str:
        """For people."""
        return f"every update is clipped to a norm of {self.norm:g} and noised by {self.multiplier:g} times that; losses stay at their site"


class NoiseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a site keeps."""

    key: str  # 64 hex digits, secret
    drawn: int  # updates that were noised, over the whole run
    noise: Noise


def noise_of(options: IslandsOptions) -> Noise | None:
    """As asked for; JobError for half of it."""
    multiplier, norm = options.noise_multiplier, options.clip_norm
    if multiplier is None and norm is None:
        if options.target_delta is not None:
            raise JobError("--target-delta: no update is noised; give --noise-multiplier and --clip-norm")
        return None
    if multiplier is None or norm is None:
        given, lacking = ("--clip-norm", "--noise-multiplier") if multiplier is None else ("--noise-multiplier", "--clip-norm")
        raise JobError(f"{given}: updates are clipped to a norm and noised by a multiple of it; give {lacking} too")
    delta = 1e-6 if options.target_delta is None else options.target_delta
    if not 0 < delta < 1:
        raise JobError(f"--target-delta: more than 0 and less than 1, got {delta}")
    if not (0 < norm < math.inf and 0 < multiplier < math.inf):
        raise JobError(f"--noise-multiplier, --clip-norm: both must be positive, got {multiplier} and {norm}")
    return Noise(norm=norm, multiplier=multiplier, delta=delta)


def check_noise(directory: RunDirectory, noise: Noise | None, sites: Sequence[str]) -> None:
    """JobError where a run that goes on was noised otherwise before: what was sent is sent, and its ε would be told wrongly."""
    records = {site: read_noise(directory, site) for site in sites}
    if noise is not None and (directory.path / "islands.json").exists() and not any(records.values()):
        raise JobError("--noise-multiplier: sites have sent updates without noise in this run; begin another run")
    for site, found in records.items():
        before = None if found is None else (found.noise.norm, found.noise.multiplier)
        now = None if noise is None else (noise.norm, noise.multiplier)
        if found is not None and before != now:
            raise JobError(
                f"--noise-multiplier, --clip-norm: site {site!r} has sent {found.drawn} updates with --noise-multiplier "
                f"{found.noise.multiplier:g} --clip-norm {found.noise.norm:g} in this run; go on with these, or begin another run"
            )


def noise_path(directory: RunDirectory, site: str) -> Path:
    """Of what a site keeps: its key is nobody else's to read."""
    return directory.path / "sites" / site / _FILE


def read_noise(directory: RunDirectory, site: str) -> NoiseRecord | None:
    """What a site has kept; None where it noised nothing. AtollError where that cannot be read: its count is then not known."""
    path = noise_path(directory, site)
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=NoiseRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise AtollError(f"{path}: cannot read which updates were noised: {error}") from None
