"""What all ranks must have alike: the job, before the first step, and buffers that training changes, after every step.

Scripts can differ between ranks without anybody noticing: a seed made from the rank, weights drawn without the seed, data that one host has
not got in full. Each would train on, with numbers that belong to no job. What must be the same and is not is an error that names it.

Running statistics are those of the samples a rank has seen, so replicas and lanes come to different ones. As in
`DistributedDataParallel`, where rank 0's count, one rank's count here: the first of the first stage that changes the buffer. Everybody else
takes them over, so that training, evaluation, checkpoints and what is exported from them never disagree.
"""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.callbacks import takes_run
from atoll.errors import JobError
from atoll.graph.capture import Captured
from atoll.job import Job
from atoll.model_identity import tied_names
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.evaluated_programs import EvaluatedPrograms
from atoll.runtime.modes.lockstep.layout import RankPlace
from atoll.weights import MatchedWeights

__all__ = [
    "Bundle",
    "ChangedBuffers",
    "Said",
    "SaidOfBuffers",
    "agree",
    "agree_on_evaluated",
    "bundles",
    "difference",
    "digest_of_code",
    "digest_of_weights",
]

_SAMPLED = 64  # numbers of each tensor that are compared
_WORDS = {
    "samples": "the length of its data",
    "order": "the samples of the first batch",
    "optimizer": "the optimizer's settings",
    "weights": "the weights the model starts from",
    "code": "the code of the model or the loss",
    "evaluated": "the captured programs of what is evaluated",
}
_ADVICE = {
    "weights": "give Job a callable that builds the model, which is called with the job's seed on every rank, or call "
    "torch.manual_seed before building it",
    "code": "give every host the same files and the same versions of libraries",
    "evaluated": "give every host the same versions of the script's libraries, and let nothing depend on the host, the time or chance",
}


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of its job. All but what it says of callbacks must be the same on every rank."""

    steps: int
    batch_size: int
    seed: int
    samples: int
    order: str  # of the first samples, in words
    precision: str
    max_grad_norm: float | None
    eval_every: int | None
    optimizer: str
    weights: str  # digest of the weights it starts from
    code: str = ""  # digest of the files with the code that runs, where no captured program says what is computed
    callbacks: bool
    requests: bool = False  # whether callbacks may ask for something (`atoll.callbacks.RunHandle`)


def digest_of_weights(model: nn.Module, read: MatchedWeights | None = None) -> str:
    """Of some numbers of every parameter and buffer, bit for bit. Of those that are `read` from files, of the files."""
    digest = hashlib.sha256(b"" if read is None else read.digest().encode())
    tied = tied_names(model)
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor) or (read is not None and tied.get(name, name) in read.names):
            continue
        flat = value.detach().reshape(-1)
        chosen = flat[:: max(1, flat.numel() // _SAMPLED)][: 2 * _SAMPLED].contiguous()
        digest.update(name.encode() + str(tuple(value.shape)).encode() + chosen.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digest_of_code(model: nn.Module, job: Job) -> str:
    """Of the files that define the classes of the model's modules, and its losses; PyTorch's are its version."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    names = {cls.__module__ for cls in classes} | {str(getattr(turn.loss, "__module__", "")) for turn in job.turns.values()}
    files = {str(getattr(sys.modules.get(name), "__file__", None) or "") for name in names if name.partition(".")[0] != "torch"}
    digests = sorted(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if Path(file).is_file())
    return hashlib.sha256(" ".join([torch.__version__.partition("+")[0], *digests]).encode()).hexdigest()


def difference(said: list[Said]) -> str | None:
    """The first thing on which ranks do not agree, in words; None when they do."""
    for field in (name for name in Said.__struct_fields__ if name not in ("callbacks", "requests")):
        first = getattr(said[0], field)
        for rank, other in enumerate(said):
            value = getattr(other, field)
            if value != first:
                values = "" if field in _ADVICE else f": {first} on rank 0, {value} on rank {rank}"
                what = f"{_WORDS.get(field, field)}{values}; {_ADVICE.get(field, 'every process must run the same job')}"
                return f"ranks 0 and {rank} do not train the same job: they differ in {what}"
    return None


def _settings_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__name__}{ {key: value for key, value in sorted(optimizer.defaults.items()) if not callable(value)} }"


def agree(job: Job, weights: str, code: str = "") -> tuple[bool, bool]:
    """Compare with all other ranks; whether any of them has callbacks that could ask to stop, and such that could ask for more."""
    probes = [turn.build_optimizer([nn.Parameter(torch.zeros(2, 2))]) for turn in job.turns.values()]
    own = Said(
        steps=job.total_steps,
        batch_size=job.batch_size,
        seed=job.seed,
        samples=job.samples.length,
        order=", ".join(str(index) for index in job.samples.request(range(min(_SAMPLED, job.batch_size))).indices),
        precision=job.precision,
        max_grad_norm=job.max_grad_norm,
        eval_every=job.eval_every,
        optimizer="; ".join(_settings_of(probe) for probe in probes),
        weights=weights,
        code=code,
        callbacks=bool(job.callbacks),
        requests=any(takes_run(callback) for callback in job.callbacks),
    )
    said = CheckpointRanks(dist.group.WORLD).gather(own, Said)
    wrong = difference(said)
    if wrong is not None:
        raise JobError(wrong)
    return any(rank.callbacks for rank in said), any(rank.requests for rank in said)


def agree_on_evaluated(programs: EvaluatedPrograms) -> None:
    """Compare with all other ranks what was captured of what is evaluated; what cannot be captured must be the same, too."""
    own = [f"{name} {program.digest() if isinstance(program, Captured) else ''}" for name, program in programs.items()]
    said = CheckpointRanks(dist.group.WORLD).gather(own, list[str])
    for rank, other in enumerate(said):
        if other != said[0]:
            what = f"{_WORDS['evaluated']}; {_ADVICE['evaluated']}"
            raise JobError(f"ranks 0 and {rank} do not train the same job: they differ in {what}")


class SaidOfBuffers(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of its buffers, by the user's names."""

    held: list[str]
    changed: dict[str, tuple[int, int, int, int]]  # by its training → the first place (stage, replica, lane, tensor) that does


class Bundle(msgspec.Struct, frozen=True, order=True):
    """Buffers that go from one rank to the same others."""

    ranks: tuple[int, ...]  # all that have them
    source: int  # whose values count
    names: tuple[str, ...]


def bundles(said: Sequence[SaidOfBuffers]) -> list[Bundle]:
    """What is to be passed on, given what every rank says: the same list on all of them."""
    together: dict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)
    for name in sorted({name for one in said for name in one.changed}):
        _, source = min((one.changed[name], rank) for rank, one in enumerate(said) if name in one.changed)
        ranks = tuple(rank for rank, one in enumerate(said) if name in one.held)
        if len(ranks) > 1:
            together[ranks, source].append(name)
    return sorted(Bundle(ranks, source, tuple(names)) for (ranks, source), names in together.items())


@dataclass
class _Travelling:
    """Buffers of one type of number, which travel as one tensor."""

    source: int
    group: Any
    tensors: list[list[Tensor]]  # each buffer's copies on this rank; the first is training's where training has it
    flat: Tensor


class ChangedBuffers:
    """This rank's buffers that training changes somewhere. All ranks make theirs together: groups are made on the way."""

    def __init__(
        self,
        rank: int,
        held: Mapping[str, Sequence[Tensor]],
        changed: Mapping[str, RankPlace],
        settle: Sequence[Callable[[], None]] = (),
    ) -> None:
        """`settle` is called before every agreement."""
        self.rank, self._settle = rank, settle
        places = {name: (place.stage, place.replica, place.lane, place.tensor) for name, place in changed.items()}
        said = CheckpointRanks(dist.group.WORLD).gather(SaidOfBuffers(held=sorted(held), changed=places), SaidOfBuffers)
        self._travelling: list[_Travelling] = []
        everyone, groups = tuple(range(len(said))), dict[tuple[int, ...], Any]()
        for bundle in bundles(said):
            if bundle.ranks not in groups:
                groups[bundle.ranks] = dist.group.WORLD if bundle.ranks == everyone else dist.new_group(list(bundle.ranks))
            if rank in bundle.ranks:
                self._pack(bundle, groups[bundle.ranks], held)

    def _pack(self, bundle: Bundle, group: Any, held: Mapping[str, Sequence[Tensor]]) -> None:
        alike: dict[torch.dtype, list[list[Tensor]]] = defaultdict(list)
        for name in bundle.names:
            alike[held[name][0].dtype].append(list(held[name]))
        for dtype, tensors in sorted(alike.items(), key=lambda item: str(item[0])):
            size = sum(copies[0].numel() for copies in tensors)
            flat = torch.empty(size, dtype=dtype, device=tensors[0][0].device)
            self._travelling.append(_Travelling(bundle.source, group, tensors, flat))

    def agree(self) -> None:
        """Take over the values that count. Every rank calls it after the same steps."""
        for settle in self._settle:
            settle()
        pending = [(row, self._send_or_receive(row)) for row in self._travelling]
        for row, work in pending:
            work.wait()
            parts = torch.split(row.flat, [copies[0].numel() for copies in row.tensors])
            for copies, part in zip(row.tensors, parts, strict=True):
                for copy in copies:
                    copy.copy_(part.view_as(copy))

    def _send_or_receive(self, row: _Travelling) -> Any:
        if row.source == self.rank:
            torch.cat([copies[0].reshape(-1) for copies in row.tensors], out=row.flat)
        return dist.broadcast(row.flat, row.source, group=row.group, async_op=True)
