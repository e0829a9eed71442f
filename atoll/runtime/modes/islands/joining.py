"""A whole site joins a run of sites: what it is told of the run, how it asks to be taken in, and which samples are its own.

A joiner adds its samples to every global batch from one on, `SiteJoined.first`; the others' stay what they were. In the endless row of
samples the batches before it are as long as they were, those from it on are longer, and every sample of the row is still one site's. The
record is durable before anybody hears of it, and it is never taken back.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from atoll.control.rounds.messages import SiteJoined
from atoll.errors import JobError, RefusedError
from atoll.fabric import Remote
from atoll.fabric.service import CallingPeer, allowed
from atoll.runtime.modes.islands.spec import IslandsSpec, SiteSpec
from atoll.runtime.modes.swarm.spec import Nothing, Start

__all__ = [
    "ASKED_SECONDS",
    "Admission",
    "JoinService",
    "SiteAsk",
    "SiteJob",
    "ask_to_join",
    "first_batch_of",
    "script_of",
    "why_not",
    "with_joined",
]

ASKED_SECONDS = 10.0  # who has not asked for so long has gone
_ASK_SECONDS = 0.5
_ANSWER_SECONDS = 30.0
_SLACK_STEPS = 4  # beyond two rounds: what the data loader has asked for ahead


class SiteJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, and how."""

    spec: IslandsSpec
    script_name: str
    script: str  # its text
    arguments: tuple[str, ...]
    start: Start
    checkpoint_every: int | None = None


class SiteAsk(msgspec.Struct, frozen=True):
    """A site wants to take part, with so many samples of every batch."""

    site: str
    samples: int


class Admission(msgspec.Struct, frozen=True):
    """What became of it."""

    joined: tuple[SiteJoined, ...] | None = None  # all sites that joined, this one included; None: not decided yet
    refused: str = ""


class JoinService:
    """Of the coordinator. `ask` is called in its loop."""

    def __init__(self, job: Callable[[], SiteJob], ask: Callable[[SiteAsk], Admission], loop: asyncio.AbstractEventLoop) -> None:
        self._job, self._ask, self._loop = job, ask, loop

    @allowed("worker")
    async def describe(self, request: Nothing, peer: CallingPeer) -> SiteJob:
        """What is trained here."""
        return self._job()

    @allowed("worker")
    async def join(self, ask: SiteAsk, peer: CallingPeer) -> Admission:
        """Asked again and again until it is decided, at a round's border."""

        async def answer() -> Admission:
            return self._ask(ask)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer(), self._loop))


def ask_to_join(coordinator: Remote, ask: SiteAsk, tell: Callable[[], None]) -> tuple[SiteJoined, ...]:
    """Waits for the round's border at which the site is taken in; all sites that joined. RefusedError says why it is not."""
    told = False
    while True:
        admission = coordinator.call_sync(JoinService.join, ask, timeout_seconds=_ANSWER_SECONDS)
        if admission.refused:
            raise RefusedError(f"{ask.site} cannot join: {admission.refused}")
        if admission.joined is not None:
            return admission.joined
        if not told:
            tell()
            told = True
        time.sleep(_ASK_SECONDS)


def why_not(spec: IslandsSpec, ask: SiteAsk, joined: Sequence[SiteJoined], batch: int) -> str:
    """Why a site is not taken in; empty: it may be."""
    known = next((one for one in joined if one.site == ask.site), None)
    if known is not None:
        if known.samples == ask.samples:
            return ""
        return f"a site of this name joined with {known.samples} samples of every batch; come back with as many (--samples)"
    if any(site.name == ask.site for site in spec.sites):
        return "the run has a site of this name; choose another"
    if any(kinds is not None for kinds in spec.may_send.values()):
        return (
            "sites of this run have rules of what may leave them (may_send in the cluster file), and none is known of this one, so nothing "
            "would be taken from it; a site that is to take part must be in the cluster file when the run is started"
        )
    if not ask.samples >= 1:
        return f"{ask.samples} samples of every batch are none"
    if batch >= spec.steps:
        return "the run has no steps left that it could take part in"
    return ""


def first_batch_of(furthest: int, inner_steps: int, workers: int, joined: Sequence[SiteJoined]) -> int:
    """Before which no site can be: nobody makes more than a round's steps beyond its last update, and another one until it hears of it.

    A site that is further all the same begins again from the common state.
    """
    last = max((one.first for one in joined), default=0)
    return max(last, furthest + 2 * inner_steps + _SLACK_STEPS + 2 * workers)


def with_joined(spec: IslandsSpec, joined: Sequence[SiteJoined]) -> IslandsSpec:
    """With the sites that joined, each with its place in the batches that have it."""
    sites, stop = list(spec.sites), spec.batch_size
    for one in joined:
        sites.append(SiteSpec(one.site, stop, stop + one.samples, one.first, True))
        stop += one.samples
    return msgspec.structs.replace(spec, sites=tuple(sites))


def script_of(job: SiteJob, directory: Path, own: Path | None) -> Path:
    """The script as the run has sent it, in the joining site's directory; or the copy that is here."""
    if own is not None:
        if not own.is_file():
            raise JobError(f"--script {own}: there is no such file")
        return own.resolve()
    path = directory / Path(job.script_name).name
    path.write_text(job.script, "utf-8")
    return path.resolve()
