"""A rank of a site: lockstep with the site's other ranks; on rank 0 a gateway beside it speaks with the other sites."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from atoll.errors import AtollError
from atoll.events import AnyEvent, Note, Observer, StepFinished, read_events
from atoll.fabric.security import Credentials
from atoll.fabric.shaped import LinkChoice
from atoll.job import Job
from atoll.runtime.mode import CapturedJob
from atoll.runtime.modes.islands.borders import IslandBorders
from atoll.runtime.modes.islands.chunks import ChunkForm
from atoll.runtime.modes.islands.exchange import SiteExchange
from atoll.runtime.modes.islands.gateway_thread import GatewayThread, SiteAccount
from atoll.runtime.modes.islands.resume import state_to_begin_with
from atoll.runtime.modes.islands.saved import newest_exchange
from atoll.runtime.modes.islands.site_noise import SiteNoise
from atoll.runtime.modes.islands.site_training import SiteSteps, site_weights
from atoll.runtime.modes.islands.spec import IslandsSpec, directory_of_site
from atoll.runtime.modes.islands.weights import SiteWeights
from atoll.runtime.modes.lockstep.role import Role
from atoll.runtime.modes.lockstep.worker import Planning, RankTraining, equal_shares, training_rank
from atoll.runtime.modes.swarm.spec import read_start
from atoll.runtime.outer_update import OuterState
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.training import train

__all__ = ["train_site"]


def train_site(
    run: RunDirectory,
    spec: IslandsSpec,
    site: str,
    role: Role,
    job: Job,
    *,
    known: CapturedJob | None,
    credentials: Credentials | None,
    address: str,
    observer: Observer,
    links: LinkChoice | None = None,
) -> None:
    """From meeting the site's other ranks to the end of the run. `credentials` are rank 0's, at `address` is the coordinator."""
    own = spec.site(site)
    share = job.share(own.start, own.stop, evaluates=site == spec.first)
    for since, more in spec.growth:
        share.samples.grow(since, more)
    directory = directory_of_site(run, site, site == spec.first)
    settings = directory.settings()
    captured = CapturedJob(share, known.captured, known.evaluated if site == spec.first else {}) if known is not None else None
    gateway: GatewayThread | None = None

    def relay(event: AnyEvent) -> None:
        if gateway is not None:
            gateway.relay(event)

    began = time.monotonic()
    told = [relay] if site == spec.first and credentials is not None else []
    with training_rank(
        share, _planning(directory, share, role), role, directory=directory, settings=settings, observers=told, own=observer,
        notes_shown=True, known=captured, cluster=run.load_cluster(),
    ) as training:  # fmt: skip
        weights, start = site_weights(training), read_start(run)
        number = start.number if start is not None else 0
        exchange = None
        if credentials is not None:
            borders = IslandBorders(spec.may_send)
            exchange = _exchange(run, spec, site, weights, training, borders, number)
            guard = borders.guard(run, site, credentials.name)
            gateway = GatewayThread(credentials, address, spec, exchange, observer, links, guard, borders.why_no_state(site))
            gateway.start()
        else:
            weights.gather()
        with _telling(gateway, training):
            steps = SiteSteps(training, weights, exchange, own.base, number, _losses(run))
            if steps.begin():
                steps.finish()
                train(training)
            reason = training.reason or "stopped"
    if gateway is not None:
        assert exchange is not None
        gateway.tell(
            SiteAccount(ended=reason, steps=exchange.steps, waited_seconds=exchange.times.waited_seconds, seconds=time.monotonic() - began)
        )
        gateway.close()


def _planning(directory: RunDirectory, share: Job, role: Role) -> Planning:
    """The site's plan; one that joined divides its samples equally among its processes."""
    if (directory.path / "plan.json").exists():
        return directory.plan()
    return lambda graph: equal_shares(graph, share.batch_size, share.micro_batch_size, role.world_size)


def _losses(run: RunDirectory) -> dict[int, float]:
    """Of the run's steps, as the coordinator has told them."""
    return {event.step: event.loss for event in read_events(run.events) if isinstance(event, StepFinished)}


def _exchange(
    run: RunDirectory, spec: IslandsSpec, site: str, weights: SiteWeights, training: RankTraining, borders: IslandBorders, number: int
) -> SiteExchange:
    row = weights.gather()
    assert row is not None
    if row.numel() != spec.elements:
        raise AtollError(
            f"{site}: {row.numel()} numbers are trained here, and {spec.elements} elsewhere; the model must be the same at all sites"
        )
    form = ChunkForm(spec.elements, spec.settings.chunks)
    training.trainer.tell(
        Note(at_seconds=training.trainer.moment(), message=f"{site} exchanges {spec.elements:,} numbers with the other sites")
    )
    begun, start = state_to_begin_with(run, site, borders.gives_states), read_start(run)
    knows = not (spec.site(site).joined and start is not None and start.number)  # the checkpoint that the run goes on from
    state = begun.state if begun is not None else OuterState.beginning(row) if knows else None
    assert training.directory is not None
    noise = SiteNoise(run, site, spec.noise) if spec.noise is not None else None

    def noised(update: str, shards: Sequence[Tensor]) -> list[Tensor]:
        assert noise is not None
        return noise.noised(f"{site}.{number}.{update}", shards)

    return SiteExchange(
        site,
        state,
        form,
        training.job.total_steps - spec.site(site).base,
        owed=begun.residual if begun is not None else None,
        restored=partial(newest_exchange, training.directory.path),
        aggregation=spec.aggregation,
        noised=noised if noise is not None else None,
    )


@contextmanager
def _telling(gateway: GatewayThread | None, training: RankTraining) -> Iterator[None]:
    """An error ends the gateway at once."""
    try:
        yield
    except BaseException:
        if gateway is not None:
            gateway.close(0.0)
        raise
