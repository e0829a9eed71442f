"""The process of one part, from its credentials to the end of the run."""

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from atoll.cluster.memory import keep_freed_memory
from atoll.collaboration import Collaboration
from atoll.data import to_device
from atoll.fabric.deadline import Backoff
from atoll.fabric.security import Credentials, RunMember
from atoll.fabric.shaped import LinkChoice
from atoll.job import Job, local_device
from atoll.randomness import mix, own_randomness
from atoll.runtime.batch_loader import BatchLoader
from atoll.runtime.checkpoint.directory import steps as saved_steps
from atoll.runtime.modes.alone.trainer import training_alone
from atoll.runtime.modes.parts.exchange import ExchangeService, Outbox, Thing, computed_part
from atoll.runtime.modes.parts.links import HubLink, PartPeers, Source
from atoll.runtime.modes.parts.messages import PartEntry, PartsSpec, sent_tensor
from atoll.runtime.modes.parts.trainer import PartConnections, PartTrainer
from atoll.runtime.modes.swarm.member_process import own_hosts
from atoll.runtime.part_executor import PartExecutor
from atoll.runtime.run_directory import RunDirectory, RunSettings
from atoll.runtime.training import train

__all__ = ["part_directory", "run_part"]

_HUB = Backoff(largest_seconds=1.0, attempts=60)
_CONNECT_SECONDS = 120.0
_DEMAND_SECONDS = 0.5


def part_directory(run: Path, name: str) -> RunDirectory:
    """Where a part's checkpoints are."""
    return RunDirectory(run / "parts" / name)


def run_part(credentials: Credentials, address: str, spec: PartsSpec, job: Collaboration, run: Path, links: LinkChoice | None) -> None:
    """Computes the part that the credentials name until the run is over. `run` is its own directory of the run, on its own disk."""
    keep_freed_memory()
    process = _PartProcess(credentials, address, spec, job, run, links)
    with process.member:
        process.work()


@dataclass
class _PartProcess:
    credentials: Credentials
    address: str
    spec: PartsSpec
    job: Collaboration
    run: Path
    links: LinkChoice | None

    def __post_init__(self) -> None:
        self.name = computed_part(self.credentials.name)
        self.part, self.device = self.job.parts[self.name], local_device()
        trains, credits = self.part.trains, self.spec.credits
        self.outbox = Outbox(self._readers(), credits if trains else 2 * credits + 2, on_demand=not trains)
        self.member = RunMember(
            self.credentials, services=[ExchangeService(self.outbox)], fingerprint=self.spec.fingerprint, links=self.links
        )

    def _readers(self) -> dict[Thing, list[str]]:
        sends = {Thing(name): self.job.receivers(name) for name in self.part.codecs}
        back = {Thing(name, True): [self.job.senders[name]] for name, how in self.part.wanted.items() if how.gradient}
        return {**sends, **back}

    @cached_property
    def hub(self) -> HubLink:
        """Connected."""
        remote = self.member.join(self.address, _HUB)
        self.member.fabric.run(remote.connected(_CONNECT_SECONDS))
        return HubLink(self.member, remote)

    @cached_property
    def listening(self) -> str:
        """Where the other parts reach this one."""
        host, told = own_hosts(self.address) if self.links is None else (self.links.source,) * 2
        return f"{told}:{self.member.fabric.listen(f'{host}:0').rpartition(':')[2]}"

    def work(self) -> None:
        """Trains or teaches, and stays for those who are not done yet."""
        if self.part.trains:
            self._train()
        else:
            self._teach()
        while not self.hub.is_over():
            pass

    # ---- a part that trains

    def _train(self) -> None:
        directory = part_directory(self.run, self.name)
        directory.path.mkdir(parents=True, exist_ok=True)
        own = self.job.part_jobs[self.name]
        begin = self.hub.enter(self._entry(tuple(saved_steps(directory.checkpoints)), self._sizes(own)))
        connections = self._connections()
        connections.begin(begin)
        settings = RunSettings(script="", mode="parts", checkpoint_every=self.spec.checkpoint_every, keep_last=self.spec.keep_last)
        make = partial(PartTrainer, self.job, self.name, connections, begin)
        saved_in = (directory, settings)
        with (
            own_randomness(mix(self.job.seed, 4)),
            training_alone(own, device=self.device, observers=(), saved_in=saved_in, make=make) as trainer,
        ):
            assert isinstance(trainer, PartTrainer)
            train(trainer)
            trainer.account()
        self.hub.wait_until_told(self.hub.sent)

    def _connections(self) -> PartConnections:
        peers, job, name = PartPeers(self.hub), self.job, self.name

        def source(thing: Thing, sender: str, optional: bool = False) -> Source:
            codec = job.parts[job.senders[thing.name]].codecs[thing.name]
            window = 1 if thing.gradient else self.spec.credits
            return Source(self.hub, peers, thing, sender, name, codec=codec, window=window, last=job.total_steps, optional=optional)

        received = {wanted: source(Thing(wanted), job.senders[wanted], how.optional) for wanted, how in self.part.wanted.items()}
        returning = list(reversed(job.order))
        gradients = {
            sent: {other: source(Thing(sent, True), other) for other in returning if other in job.returned_by(sent)}
            for sent in self.part.codecs
            if job.returned_by(sent)
        }
        return PartConnections(self.hub, self.outbox, received, gradients)

    def _entry(self, steps: tuple[int, ...], sizes: tuple[int, int]) -> PartEntry:
        return PartEntry(
            address=self.listening,
            steps=steps,
            parameters=sizes[0],
            frozen_parameters=sizes[1],
            device=str(self.device),
            samples=self.job.samples.length,
        )

    @staticmethod
    def _sizes(job: Job, frozen: bool = False) -> tuple[int, int]:
        """Parameters that are trained, and that are not."""
        parameters = list(job.build_model("meta").parameters())
        trained = 0 if frozen else sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        return trained, sum(parameter.numel() for parameter in parameters) - trained

    # ---- a part that does not

    def _teach(self) -> None:
        """Computes what it is asked for, a step at a time, until the run is over."""
        own = self.job.part_jobs[self.name]
        with own_randomness(mix(self.job.seed, 4)):
            executor = PartExecutor(self.job, self.name, own.build_model(self.device), self.device)
            loader = BatchLoader(self.job.samples, 0)
            self.hub.enter(self._entry((), self._sizes(own, frozen=True)))
            over = self.member.fabric.submit(self._over())
            while not over.done():
                step = self.member.fabric.run(self.outbox.wanted(_DEMAND_SECONDS))
                if step is None:
                    continue
                batch = to_device(loader.load(self.job.samples.part(step - 1, 0, self.job.batch_size, last=True)).batch, self.device)
                sent = executor.forward(step, batch, {})
                values = {Thing(name): sent_tensor(value, self.part.codecs[name]) for name, value in sent.items()}
                self.member.fabric.run(self.outbox.put(step, values))
            loader.close()
            over.result()

    async def _over(self) -> None:
        from atoll.runtime.modes.parts.hub import PartsHub
        from atoll.runtime.modes.parts.messages import HubQuestion

        while not await self.hub.remote.call(PartsHub.over, HubQuestion(), timeout_seconds=60.0):
            pass
