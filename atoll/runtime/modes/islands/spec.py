"""What the processes of sites that train together must know of the run: the sites, their plans, and how rounds are made."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from atoll.cluster import Cluster
from atoll.cluster.cluster import device_index
from atoll.codec.registry import make_codec
from atoll.control.rounds import RoundSettings, RoundTerms
from atoll.control.rounds.messages import Position, SiteJoined
from atoll.errors import CodecError, JobError
from atoll.fabric.fingerprint import job_fingerprint
from atoll.job import Job
from atoll.plan import Plan
from atoll.plan.modes.islands import IslandsOptions
from atoll.plan.sites import SitePart, site_parts
from atoll.planner.outer_choice import FEWEST, GRADIENT_CODECS, GRADIENTS_WAIT, OuterChoice, SiteLinks, choose_outer
from atoll.runtime.modes.islands.aggregate import MEAN, Aggregation, aggregation_of
from atoll.runtime.modes.islands.borders import IslandBorders
from atoll.runtime.modes.islands.noise import Noise, noise_of
from atoll.runtime.outer_update import OuterTerms
from atoll.runtime.run_directory import RunDirectory, RunSettings, with_checksum

__all__ = [
    "ACCOUNTS",
    "MARK",
    "IslandsSpec",
    "RoundChoice",
    "RoundMark",
    "choose_exchange",
    "choose_rounds",
    "directory_of_site",
    "islands_spec",
    "links_of",
    "read_islands",
    "why_no_gradients",
    "write_islands",
    "write_site",
]

MARK = "islands"
"""In a checkpoint's `extra`: of which state of which rounds it is (`RoundMark`)."""

ACCOUNTS = "sites.json"  # in a run's directory: what each site did with its time, when it ended
_SPEC = "islands.json"
_CHUNK_ELEMENTS = 1 << 18  # 2 MB of state, an eighth of a megabyte of an update in int4
_IN_FLIGHT = 8  # chunks that a site asks for at once
_MOST_CHUNKS = 1024
_MOST_ROUNDS = 1 << 40
_GRACE_STEPS = 0.5  # of a round, for which the others are waited
_LARGEST_BUCKET, _FEWEST_BUCKETS = 4 << 20, 8
_START_SECONDS = 120.0  # for all sites to be there before the first round


class RoundChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a round is made: in `RoundTerms.choice`, as JSON."""

    inner_steps: int  # H
    delay_steps: int  # τ
    codec: str
    learning_rate: float  # η
    momentum: float  # μ
    feedback: float = 1.0  # β
    equal_steps: bool = False  # every site makes all of them
    joined: tuple[SiteJoined, ...] = ()  # sites that the run did not begin with
    rung: tuple[int, int] | None = None  # of what the links say (`OuterChoice.rung`), some of which may have been asked for otherwise
    exchange: Literal["gradients", "weights"] = "weights"

    @property
    def outer(self) -> OuterTerms:
        """The numbers of the outer update."""
        return OuterTerms(learning_rate=self.learning_rate, momentum=self.momentum, feedback=self.feedback)

    def terms(self) -> RoundTerms:
        """What a coordinator says of a round."""
        return RoundTerms(0.0, msgspec.json.encode(self).decode())

    @classmethod
    def chosen(cls, choice: OuterChoice) -> "RoundChoice":
        """What the links say."""
        return cls(
            inner_steps=choice.inner_steps,
            delay_steps=choice.delay_steps,
            codec=choice.codec,
            learning_rate=choice.learning_rate,
            momentum=choice.momentum,
            rung=choice.rung,
            exchange="gradients" if choice.algorithm == "gradients" else "weights",
        )

    @classmethod
    def of(cls, terms: RoundTerms) -> "RoundChoice":
        """What was said."""
        return msgspec.json.decode(terms.choice, type=cls)


_UNKNOWN = RoundChoice(
    inner_steps=FEWEST, delay_steps=0, codec="int4", learning_rate=0.6, momentum=0.9, rung=(len(GRADIENT_CODECS), FEWEST)
)
_FEW = 4  # inner steps, at which momentum harms by the trials in docs/islands.md
_WITH_GRADIENTS: Mapping[str, tuple[object, ...]] = {
    "exchange": ("gradients", "weights"), "inner_steps": (1,), "delay_steps": (0,), "equal_steps": (True,),
    "adapt": (False,), "frugal": (True,),
}  # fmt: skip
"""What may be asked for with gradients every step, beside a codec and defaults; whatever else is asked for is of the outer update."""
_NEUTRAL = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}  # gradients that are asked for go with these, too
_ASKED = ("inner_steps", "delay_steps", "outer_codec", "outer_learning_rate", "outer_momentum", "quorum")


class RoundMark(msgspec.Struct, frozen=True):
    """A state of the rounds of one start of a run."""

    number: int  # how often the run was started before
    position: Position


class SiteSpec(msgspec.Struct, frozen=True):
    """One site. One that `joined` has its samples behind all others', and none of batches before `base`."""

    name: str
    start: int  # of its samples in every global batch
    stop: int
    base: int = 0  # steps it had made before these rounds; or the others, when it joined
    joined: bool = False


class IslandsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The run between sites."""

    sites: tuple[SiteSpec, ...]
    settings: RoundSettings
    choice: RoundChoice
    reasons: tuple[str, ...]
    elements: int  # numbers that are exchanged
    steps: int
    batch_size: int
    bucket_bytes: int  # of gradients that are exchanged together
    fingerprint: dict[str, str]
    options: IslandsOptions = IslandsOptions()  # as asked for
    growth: tuple[tuple[int, int], ...] = ()  # of the batches, by sites that joined before these rounds (`Samples.grow`)
    aggregation: Aggregation = MEAN
    noise: Noise | None = None
    may_send: dict[str, tuple[str, ...] | None] = {}  # what may leave each site, as the cluster file says

    @property
    def adapts(self) -> bool:
        """Whether later rounds are made as measured links ask for. Not by itself where runs are to be repeated."""
        return not self.choice.equal_steps if self.options.adapt is None else self.options.adapt

    def site(self, name: str) -> SiteSpec:
        """The one of that name."""
        return next(site for site in self.sites if site.name == name)

    @property
    def first(self) -> str:
        """The site that evaluates, and whose checkpoint the run's is."""
        return self.sites[0].name


def islands_spec(
    settings: RunSettings,
    job: Job,
    plan: Plan,
    cluster: Cluster,
    options: IslandsOptions,
    elements: int,
    step_seconds: float | None,
    bases: Mapping[str, int],
    growth: tuple[tuple[int, int], ...] = (),
) -> IslandsSpec:
    """What a plan and options mean for a job; JobError for options that mean nothing together. `bases` are steps sites have made before."""
    parts = site_parts(plan, cluster)
    links = links_of(parts, cluster, elements, step_seconds, frugal=options.frugal)
    borders = IslandBorders.of(cluster, [part.site for part in parts])
    choice, reasons = choose_exchange(options, links, why_no_gradients(job, parts) or borders.why_not("gradients"))
    patience = _patience(links)
    aggregation, noise = aggregation_of(options, len(parts)), noise_of(options)
    quorum = options.quorum if options.quorum is not None else (len(parts) if choice.equal_steps else 2 * aggregation.trim + 1)
    if quorum > len(parts):
        raise JobError(f"--quorum {quorum}: there are {len(parts)} sites")
    rounds = RoundSettings(
        rounds=_MOST_ROUNDS if job.total_steps > max(bases.values(), default=0) else 0,  # it is over when a site has made all its steps
        chunks=min(_MOST_CHUNKS, max(1, math.ceil(elements / _CHUNK_ELEMENTS))),
        quorum=quorum,
        sites=len(parts),
        start_seconds=_START_SECONDS,
        listen_seconds=1.0,
        in_flight=_IN_FLIGHT,
        patience_seconds=patience,
        exchange_seconds=_exchange_seconds(links, choice),
        grace_seconds=_grace(choice, step_seconds),
    )
    sites = tuple(SiteSpec(part.site, part.start, part.stop, bases.get(part.site, 0)) for part in parts)
    config = {"sites": msgspec.to_builtins(sites), "choice": msgspec.to_builtins(choice), "arguments": list(settings.arguments)}
    config["aggregation"] = msgspec.to_builtins(aggregation)
    return IslandsSpec(
        sites=sites,
        settings=rounds,
        choice=choice,
        reasons=(*reasons, *aggregation.reasons, *(() if noise is None else (noise.reason,))),
        elements=elements,
        steps=job.total_steps,
        batch_size=job.batch_size,
        bucket_bytes=max(1, min(_LARGEST_BUCKET, 4 * elements // _FEWEST_BUCKETS)),
        fingerprint=job_fingerprint([Path(settings.script)], config),
        options=options,
        growth=growth,
        aggregation=aggregation,
        noise=noise,
        may_send=borders.may_send_by_site,
    )


def _patience(links: SiteLinks | None) -> float:
    """After which time a chunk that was asked for is lost: a state's are the largest, and all that are asked for share the link."""
    if links is None:
        return 5.0
    largest = 8 * min(links.parameters, _CHUNK_ELEMENTS) * _IN_FLIGHT
    return max(5.0, 3 * links.passes * largest / links.bytes_per_s + 2 * links.round_trip_s)


def _exchange_seconds(links: SiteLinks | None, choice: RoundChoice) -> float:
    """After which time a round whose updates did not come is named without the one that most sites lack."""
    if links is None:
        return 60.0
    bits = make_codec(choice.codec).spec.bits or 32.0
    return max(60.0, 4 * links.exchange_s(bits))


def _grace(choice: RoundChoice, step_seconds: float | None) -> float:
    """How long others are waited for once there is a quorum: where all make all steps, as long as they are heard."""
    if choice.equal_steps:
        return 1e9
    return max(10.0, _GRACE_STEPS * choice.inner_steps * (step_seconds or 0.0))


def links_of(parts: Sequence[SitePart], cluster: Cluster, elements: int, step_seconds: float | None, *, frugal: bool) -> SiteLinks | None:
    """What the choice is made from: the slowest link between two of the sites. None where no step time is known."""
    if not step_seconds:
        return None
    places, names = device_index(cluster), [part.site for part in parts]
    one = {part.site: places[part.plan.stages[0].devices[0]] for part in parts}
    links = [cluster.link_between(one[a], one[b]) for a in names for b in names if a < b]
    return SiteLinks(
        bytes_per_s=min(link.bytes_per_s for link in links),
        round_trip_s=2 * max(link.latency_s for link in links),
        step_s=step_seconds,
        parameters=elements,
        sites=len(parts),
        frugal=frugal,
        gradients=False,
    )


def why_no_gradients(job: Job, parts: Sequence[SitePart]) -> str | None:
    """Why these sites cannot exchange gradients at every step; None: they can."""
    for part in parts:
        if len(part.plan.stages) > 1 or part.plan.stages[0].sharded or part.plan.stages[0].tensor > 1:
            return f"the ranks of {part.site} have parts of the model each, and whoever exchanges gradients needs all of it"
    if job.precision == "fp16":
        return "fp16 scales losses, and so what is owed of gradients, differently from step to step; bf16 does not"
    return None


def choose_exchange(options: IslandsOptions, links: SiteLinks | None, why_not: str | None) -> tuple[RoundChoice, tuple[str, ...]]:
    """Gradients every step or weights every so many: as asked for, else as the links say, with the reasons.

    `why_not` says why gradients cannot be exchanged, if so.
    """
    outer = [
        field.name
        for field in msgspec.structs.fields(options)
        if field.name != "outer_codec" and getattr(options, field.name) not in (field.default, *_WITH_GRADIENTS.get(field.name, ()))
    ]
    if options.exchange == "gradients":
        if why_not is not None:
            raise JobError(f"--exchange gradients: {why_not}; use --exchange weights")
        outer = [name for name in outer if getattr(options, name) != _NEUTRAL.get(name)]  # as a run that is resumed may have been asked for
        if outer:  # an option that is unknown here is taken for one of those: noise that is asked for must not be left out
            raise JobError(f"--exchange gradients: there is no outer update, so leave out --{outer[0].replace('_', '-')}")
        return _choose_gradients(options, links)
    if links is None:
        return choose_rounds(options, None)
    chosen = choose_outer(msgspec.structs.replace(links, gradients=True))
    fits = chosen.algorithm == "gradients" and (
        options.outer_codec is None or options.outer_codec in GRADIENT_CODECS[GRADIENT_CODECS.index(chosen.codec) :]
    )
    if fits and why_not is None and not outer and options.exchange is None:
        return _choose_gradients(options, links)
    choice, reasons = choose_rounds(options, msgspec.structs.replace(links, gradients=False))
    said = (f"gradients every step would fit the links, but {why_not}",) if fits and why_not is not None else ()
    return choice, (*reasons, *said)


def _choose_gradients(options: IslandsOptions, links: SiteLinks | None) -> tuple[RoundChoice, tuple[str, ...]]:
    chosen = choose_outer(msgspec.structs.replace(links, gradients=True)) if links is not None else None
    fits = chosen is not None and chosen.algorithm == "gradients"
    codec = options.outer_codec or (chosen.codec if chosen is not None and fits else "int4")
    if codec not in GRADIENT_CODECS:
        raise JobError(f"--outer-codec {codec}: gradients every step are sent as {', '.join(GRADIENT_CODECS)}")
    asked = [name.replace("_", " ") for name in ("exchange", "outer_codec") if getattr(options, name) is not None]
    own = (f"as asked for: {', '.join(asked)}",) if asked else ()
    reasons: tuple[str, ...] = (GRADIENTS_WAIT,)
    if chosen is not None and fits:
        reasons = chosen.reasons
    elif chosen is not None:
        reasons = (
            *chosen.reasons[:1],
            "gradients do not hide behind the backward pass there: every step waits for the links",
            GRADIENTS_WAIT,
        )
    choice = RoundChoice(inner_steps=1, delay_steps=0, codec=codec, learning_rate=1.0, momentum=0.0, equal_steps=True, exchange="gradients")
    return choice, (*reasons, *own)


def choose_rounds(options: IslandsOptions, links: SiteLinks | None) -> tuple[RoundChoice, tuple[str, ...]]:
    """What was asked for, and for the rest what the links say, with the reasons."""
    if options.outer_codec is not None:
        _bits_of(options.outer_codec)
    chosen = choose_outer(links) if links is not None else None
    base = _UNKNOWN if chosen is None else RoundChoice.chosen(chosen)
    steps = options.inner_steps or base.inner_steps
    if steps <= _FEW:
        base = msgspec.structs.replace(base, learning_rate=1.0, momentum=0.0)
    delay = base.delay_steps
    if links is not None and options.outer_codec is not None:
        delay = links.delay_steps(_bits_of(options.outer_codec))
    given = {
        "inner_steps": options.inner_steps,
        "delay_steps": options.delay_steps if options.delay_steps is not None else min(steps, delay),
        "codec": options.outer_codec,
        "learning_rate": options.outer_learning_rate,
        "momentum": options.outer_momentum,
        "equal_steps": options.equal_steps,
    }
    found = msgspec.structs.replace(base, **{name: value for name, value in given.items() if value is not None})
    if found.delay_steps > steps:
        late = f"an update must be there before the next one is made, {steps} steps later"
        raise JobError(f"--delay-steps {found.delay_steps}: {late}; give {steps} or fewer")
    return found, _reasons(options, chosen)


def _bits_of(codec: str) -> float:
    """Of a codec that was asked for."""
    try:
        return make_codec(codec).spec.bits or 32.0
    except CodecError as error:
        raise JobError(f"--outer-codec: {error}") from None


def _reasons(options: IslandsOptions, chosen: OuterChoice | None) -> tuple[str, ...]:
    """For what was not asked for."""
    asked = [name.replace("_", " ") for name in _ASKED if getattr(options, name) is not None]
    own = (f"as asked for: {', '.join(asked)}",) if asked else ()
    if options.inner_steps is not None and options.outer_codec is not None:
        return own
    if chosen is None:
        return ("nothing is known of a step's time: as links of the internet mostly ask for", *own)
    few = (
        (f"no momentum: it harms where there are at most {_FEW} inner steps",)
        if (options.inner_steps or chosen.inner_steps) <= _FEW
        else ()
    )
    return (*chosen.reasons, *few, *own)


def write_islands(directory: RunDirectory, spec: IslandsSpec) -> None:
    """For the processes of the run."""
    directory.write(_SPEC, with_checksum(msgspec.json.format(msgspec.json.encode(spec), indent=1)))


def read_islands(path: Path) -> IslandsSpec:
    """What was written."""
    return RunDirectory(path).read_as(_SPEC, IslandsSpec)


class _SiteDirectory(RunDirectory):
    """Of a site whose checkpoints are the run's."""

    def __init__(self, path: Path, checkpoints: Path) -> None:
        super().__init__(path)
        self.checkpoints = checkpoints


def directory_of_site(run: RunDirectory, site: str, first: bool) -> RunDirectory:
    """Where a site writes what concerns it alone. The first site's checkpoints are the run's own."""
    path = run.path / "sites" / site
    return _SiteDirectory(path, run.checkpoints) if first else RunDirectory(path)


def write_site(run: RunDirectory, part: SitePart, first: bool, settings: RunSettings) -> None:
    """What a site's processes find in its directory."""
    own = directory_of_site(run, part.site, first)
    own.path.mkdir(parents=True, exist_ok=True)
    own.write_settings(msgspec.structs.replace(settings, mode=part.plan.mode, options={}))
    own.write_plan(part.plan)
