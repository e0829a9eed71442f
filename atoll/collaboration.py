"""Collaboration: several models that learn from one another, as one Job — teacher and student, generator and discriminator.

```python
job = atoll.collaborate(
    teacher=atoll.Part(model=teacher, trains=False, sends={"logits": atoll.top_k(16)}),
    student=atoll.Part(model=student, loss=distil, optimizer=optimizer, receives=["logits"]),
    data=data, batch_size=32, steps=1000,
)
```

In every step all parts see the same batch. Each computes with the weights of the step before and what it receives; gradients go back where
that was asked for; then every part that trains makes its step. `docs/parts.md` says what can be relied on.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, NoReturn, TypeAlias, cast

import torch
from torch import nn

from atoll.blame import SentenceIfUncaught
from atoll.codec.registry import make_codec
from atoll.codec.top_logits import TopLogits
from atoll.errors import CodecError, JobError
from atoll.job import Job, LossFunction, OptimizerBuilder, SchedulerBuilder
from atoll.randomness import mix, own_randomness

__all__ = ["Collaboration", "Part", "Receive", "TrainedTogether", "check_not_divided", "collaborate", "top_k"]

PartFunction: TypeAlias = Callable[..., Any]
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_SHARED = (
    *("data", "batch_size", "steps", "epochs", "collate_fn", "num_workers", "sampler", "drop_last", "seed"),
    *("eval_data", "eval_every", "callbacks", "name"),
)
"""Arguments of a Job that all parts share."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Receive:
    """How a part takes what another sends, where it is not just there: `receives={"features": atoll.Receive(gradient=True)}`."""

    gradient: bool | PartFunction = False
    """Whether a gradient goes back to the sender: that of the receiver's own loss; or that of a function like it,
    `fool(model, batch, received)`, which trains the sender alone (a GAN's generator)."""
    optional: bool = False
    """Whether steps are made without it, too, with None in its place, while its sender is not there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A model of a collaboration: what trains it, what it sends to the others and receives from them."""

    model: nn.Module | Callable[[], nn.Module]
    """As a Job's."""
    loss: PartFunction | None = None
    """`loss(model, batch)`, or `loss(model, batch, received)` of a part that receives: what a Job's returns. A part that sends returns a
    pair of that and what it sends, by name: `(loss, {"tokens": tokens})`."""
    forward: PartFunction | None = None
    """What a part without a loss of its own sends, by name, or the one tensor: `forward(model, batch)`, with `received` if it receives.
    None: `model(batch)`, or `model(**batch)` where a batch is a mapping."""
    optimizer: OptimizerBuilder | None = None
    """As a Job's; None: that of the collaboration."""
    scheduler: SchedulerBuilder | None = None
    """As a Job's."""
    max_grad_norm: float | None = None
    """As a Job's, of this part's gradient."""
    trains: bool = True
    """False: it is in evaluation mode, without gradients, and makes no steps."""
    sends: Mapping[str, str] | Sequence[str] = ()
    """Names of what it sends, and what each looks like on a link: `"none"`, `"bf16"`, `"int8"`, … or `atoll.top_k(16)`. Integers always
    travel exactly. What arrives is the same wherever the parts are, in one process too."""
    receives: Mapping[str, Receive] | Sequence[str] = ()
    """Names of what it receives, without a gradient unless a `Receive` says so."""
    site: str | None = None
    """Of the cluster file, where it is computed; None: wherever it fits best."""
    weights: Any = None
    """As a Job's."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """As a Job's."""
    eval_loss: LossFunction | None = None
    """`eval_loss(model, batch)` of this part by itself, on the collaboration's `eval_data`."""
    metrics: Mapping[str, LossFunction] = field(default_factory=dict)
    """As a Job's, of this part by itself."""

    @property
    def codecs(self) -> dict[str, str]:
        """What it sends, and the codec of each."""
        return dict(self.sends) if isinstance(self.sends, Mapping) else dict.fromkeys(self.sends, "none")

    @property
    def wanted(self) -> dict[str, Receive]:
        """What it receives, and how."""
        return dict(self.receives) if isinstance(self.receives, Mapping) else dict.fromkeys(self.receives, Receive())

    @property
    def is_evaluated(self) -> bool:
        """Whether it says what to evaluate of it."""
        return self.eval_loss is not None


def top_k(kept: int) -> str:
    """How logits are sent: of every position the `kept` largest, and what the others are on average; 51 bytes for 16 of 65,536."""
    with SentenceIfUncaught():
        try:
            return TopLogits(kept).text
        except (CodecError, TypeError):
            raise JobError(f"top_k: takes how many values of each position to keep, from 1 to 4096, got {kept!r}") from None


class TrainedTogether(nn.Module):
    """The models of a collaboration, each under the name of its part. Those that do not train stay in evaluation mode."""

    def __init__(self, models: Mapping[str, nn.Module], frozen: frozenset[str]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)
        self._frozen = frozen

    def train(self, mode: bool = True) -> "TrainedTogether":
        """Of those that train."""
        super().train(mode)
        for name in self._frozen:
            self.get_submodule(name).eval()
        return self


def _not_by_itself(*arguments: object) -> NoReturn:
    raise JobError("collaborate: a part is computed with the others, not by itself")


def _needs_a_model() -> NoReturn:
    _not_by_itself()


def _needs_a_batch(model: nn.Module, batch: Any) -> NoReturn:
    _not_by_itself()


class _SeededModel:
    """Builds a part's model from randomness of its own, so that equal models do not begin equal. Frozen ones take no gradient."""

    def __init__(self, build: Callable[[], nn.Module], key: int) -> None:
        self._build, self._key = build, key

    def __call__(self) -> nn.Module:
        with own_randomness(self._key, devices=False):
            return self._build()


@dataclass(frozen=True, kw_only=True, eq=False)
class Collaboration(Job):
    """The Job that `collaborate` makes: its steps are those of all parts together."""

    parts: Mapping[str, Part] = field(default_factory=dict)
    """By name."""

    def __post_init__(self) -> None:
        with SentenceIfUncaught():
            _check_parts(self.parts)
        super().__post_init__()
        with SentenceIfUncaught():
            self._check_shared()
            for name in self.parts:
                _ = self.part_jobs[name]  # a wrong figure is told now

    def _check_shared(self) -> None:
        for argument in (
            "micro_batch_size",
            "max_grad_norm",
            "scheduler",
            "weights",
            "ema_decay",
            "parameter_groups",
            "metrics",
            "compile",
        ):
            if getattr(self, argument):
                _wrong(argument, "is not for all parts together; a part may have its own scheduler, max_grad_norm, weights and metrics")
        if self.precision != "fp32":
            _wrong("precision", "every part has its own; give it to the parts")
        evaluated = any(part.eval_loss is not None for part in self.parts.values())
        if self.eval_data is not None and not evaluated:
            _wrong("eval_data", "no part says what to evaluate: give one an eval_loss")
        for name, part in self.parts.items():
            if part.is_evaluated and self.eval_data is None:
                _wrong(f"{name}: eval_loss", "needs eval_data to evaluate on")

    @cached_property
    def part_jobs(self) -> "dict[str, Job]":
        """Each part as a Job of its own: its model, optimizer and evaluation; its loss needs the other parts."""
        return {name: self._part_job(name) for name in self.parts}

    def _part_job(self, name: str) -> Job:
        part, shared = self.parts[name], {field: getattr(self, field) for field in _SHARED}
        if not part.is_evaluated:
            shared.update(eval_data=None, eval_every=None)
        shared.update(data=lambda: self.dataset, callbacks=(), name=f"{self.name}.{name}")
        if self.eval_data is not None and part.is_evaluated:
            shared.update(eval_data=lambda: self.eval_dataset)
        model = part.model
        try:
            return Job(
                model=model if isinstance(model, nn.Module) else _SeededModel(model, self.part_seed(name)),
                loss=_needs_a_batch,
                optimizer=self.optimizer[name] if isinstance(self.optimizer, Mapping) and part.trains else torch.optim.SGD,
                scheduler=part.scheduler,
                max_grad_norm=part.max_grad_norm,
                weights=part.weights,
                precision=part.precision,
                eval_loss=part.eval_loss,
                metrics=part.metrics,
                **shared,
            )
        except JobError as error:
            raise JobError(str(error).replace("Job: ", f"collaborate: {name}: ", 1)) from None

    @cached_property
    def made_anew(self) -> frozenset[str]:
        """Of all parts, under the names they have in the whole."""
        return frozenset(f"{name}.{parameter}" for name, job in self.part_jobs.items() for parameter in job.made_anew)

    def part_seed(self, name: str) -> int:
        """What a part's first weights and its random numbers follow from."""
        return mix(self.seed, 6, list(self.parts).index(name))

    @cached_property
    def turns(self) -> "dict[str, Job]":
        """The parts that make steps."""
        return {name: job for name, job in self.part_jobs.items() if self.parts[name].trains}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The parts, each after all that it receives from."""
        return _ordered(self.parts)

    @cached_property
    def senders(self) -> dict[str, str]:
        """The part that sends each name."""
        return {name: sender for sender, part in self.parts.items() for name in part.codecs}

    def receivers(self, name: str) -> list[str]:
        """The parts that receive what has this name."""
        return [receiver for receiver, part in self.parts.items() if name in part.wanted]

    def returned_by(self, name: str) -> list[str]:
        """The parts that give a gradient for what has this name."""
        return [receiver for receiver in self.receivers(name) if self.parts[receiver].wanted[name].gradient]

    def build_model(self, device: torch.device | str = "cpu") -> nn.Module:
        """All models, each under the name of its part."""
        models = {name: job.build_model(device) for name, job in self.part_jobs.items()}
        frozen = frozenset(name for name, part in self.parts.items() if not part.trains)
        for name in frozen:
            models[name].requires_grad_(False)
        self._check_apart(models)
        return TrainedTogether(models, frozen).train()

    def _check_apart(self, models: Mapping[str, nn.Module]) -> None:
        owner: dict[int, str] = {}
        for name, model in models.items():
            for parameter in model.parameters():
                if owner.setdefault(id(parameter), name) != name:
                    _wrong(name, f"it shares a parameter with {owner[id(parameter)]}; every part has its own")


def check_not_divided(job: Job) -> None:
    """JobError for a collaboration, where one model is to be divided among devices."""
    if isinstance(job, Collaboration):
        raise JobError(
            "collaborate: parts are computed whole; train them with --mode parts, each in a process of its own, or --alone, all in one"
        )


def collaborate(*, optimizer: OptimizerBuilder | None = None, **arguments: Any) -> Collaboration:
    """Parts by their names, and what they share: arguments of a Job (data, batch_size, steps, seed, eval_data, …).

    `optimizer` is for parts that bring none.
    """
    with SentenceIfUncaught():
        parts = {name: value for name, value in arguments.items() if isinstance(value, Part)}
        rest = {name: value for name, value in arguments.items() if name not in parts}
        _check_arguments(parts, rest)
        _check_parts(parts)
        trained = [name for name, part in parts.items() if part.trains]
        for name in trained:
            if parts[name].optimizer is None and optimizer is None:
                _wrong(name, "it has no optimizer: give it one, or one to collaborate for all parts that bring none")
        return Collaboration(
            parts=parts,
            model=_needs_a_model,
            loss=dict.fromkeys(trained, _needs_a_batch),
            optimizer={name: cast(OptimizerBuilder, parts[name].optimizer or optimizer) for name in trained},
            eval_loss=_needs_a_batch if rest.get("eval_data") is not None else None,
            **rest,
        )


def _check_arguments(parts: Mapping[str, Part], rest: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(Collaboration)} | {"training"}
    for name in parts:
        if name in known or hasattr(nn.Module, name):
            _wrong(name, "a part cannot be called that; give it another name")
        if not _NAME.fullmatch(name):
            _wrong(name, "a part's name is a letter, then up to 31 letters, digits and underscores")
    for name in rest:
        if name not in _SHARED:
            near = difflib.get_close_matches(name, _SHARED, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"it takes parts (atoll.Part), optimizer, {', '.join(_SHARED)}"
            _wrong(name, f"is no argument of a collaboration; {hint}")


def _check_parts(parts: Mapping[str, Part]) -> None:
    """They fit together, and every one by itself."""
    if len(parts) < 2:
        _wrong("parts", f"give at least two, by their names: teacher=atoll.Part(…), student=atoll.Part(…); got {len(parts)}")
    if not any(part.trains for part in parts.values()):
        _wrong("parts", "none of them trains")
    senders: dict[str, str] = {}
    for name, part in parts.items():
        _check_part(name, part)
        for sent in part.codecs:
            if sent in senders:
                _wrong(name, f"it sends {sent!r}, and so does {senders[sent]}; what is sent has one sender")
            senders[sent] = name
    for name, part in parts.items():
        for wanted, how in part.wanted.items():
            _check_edge(parts, senders, name, wanted, how)
    received = {wanted for part in parts.values() for wanted in part.wanted}
    for sent, name in senders.items():
        if sent not in received:
            _wrong(name, f"it sends {sent!r}, which no part receives; leave it out")
    for name, part in parts.items():
        back = [how for other in parts.values() for wanted, how in other.wanted.items() if senders[wanted] == name and how.gradient]
        if part.trains and part.loss is None and not back:
            _wrong(name, "nothing trains it: give it a loss, let a part that receives from it return a gradient, or say trains=False")
    _ordered(parts)


def _check_part(name: str, part: Part) -> None:
    for argument in ("sends", "receives"):
        given = getattr(part, argument)
        if isinstance(given, str) or not all(isinstance(one, str) and one for one in given):
            _wrong(f"{name}: {argument}", f"takes names, such as {argument}=['logits'], got {given!r}")
    for sent, codec in part.codecs.items():
        try:
            make_codec(codec)
        except (CodecError, AttributeError):
            known = "'none', 'bf16', 'fp16', 'int8', 'int4' or atoll.top_k(16)"
            _wrong(f"{name}: sends", f"{sent!r}: {codec!r} is not how anything is sent; write {known}")
    for wanted, how in part.wanted.items():
        if not isinstance(how, Receive):
            _wrong(f"{name}: receives", f"{wanted!r}: takes an atoll.Receive(…), got {how!r}")
    count = 3 if part.wanted else 2
    wanted_arguments = "(model, batch, received)" if part.wanted else "(model, batch)"
    functions: list[tuple[str, Any]] = [("loss", part.loss), ("forward", part.forward)]
    functions += [(f"receives[{key!r}].gradient", how.gradient) for key, how in part.wanted.items() if not isinstance(how.gradient, bool)]
    for argument, function in functions:
        if function is not None and not _takes(function, count):
            _wrong(f"{name}: {argument}", f"must be a function {argument.partition('[')[0]}{wanted_arguments}")
    if part.loss is not None and part.forward is not None:
        _wrong(f"{name}: forward", "a part with a loss returns what it sends with it, (loss, {name: tensor}); leave forward out")
    if part.precision not in ("fp32", "bf16"):
        _wrong(f"{name}: precision", f"must be 'fp32' or 'bf16', got {part.precision!r}")
    if part.metrics and part.eval_loss is None:
        _wrong(f"{name}: metrics", "are found where a part is evaluated; give it an eval_loss, too")
    if not part.trains:
        _check_frozen(name, part)


def _check_frozen(name: str, part: Part) -> None:
    for argument in ("loss", "optimizer", "scheduler", "max_grad_norm"):
        if getattr(part, argument) is not None:
            _wrong(f"{name}: {argument}", "it does not train (trains=False); leave it out")
    if part.wanted:
        _wrong(f"{name}: receives", "a part that does not train receives nothing: it only teaches others")
    if part.eval_loss is not None:
        _wrong(f"{name}: eval_loss", "it does not train (trains=False), and is the same after every step; leave it out")
    if not part.codecs:
        _wrong(name, "it neither trains nor sends anything")


def _check_edge(parts: Mapping[str, Part], senders: Mapping[str, str], name: str, wanted: str, how: Receive) -> None:
    if wanted not in senders:
        near = difflib.get_close_matches(wanted, senders, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(map(repr, senders)) or 'nothing that is sent'}"
        _wrong(f"{name}: receives", f"no part sends {wanted!r}; {hint}")
    sender = senders[wanted]
    if sender == name:
        _wrong(f"{name}: receives", f"it sends {wanted!r} itself")
    if how.gradient and not parts[sender].trains:
        _wrong(f"{name}: receives", f"{wanted!r}: a gradient trains its sender, and {sender} does not train")
    if how.gradient and make_codec(parts[sender].codecs[wanted]).text.startswith("top-"):
        _wrong(f"{name}: receives", f"{wanted!r}: it is sent in part, so no gradient can go back; send it as 'none' or 'bf16'")
    if how.optional and parts[sender].trains:
        what = f"{wanted!r}: only what a part that does not train sends can be done without, and {sender} trains"
        _wrong(f"{name}: receives", f"{what}: both go back together to a checkpoint")


def _ordered(parts: Mapping[str, Part]) -> tuple[str, ...]:
    senders = {sent: name for name, part in parts.items() for sent in part.codecs}
    try:
        return tuple(TopologicalSorter({name: {senders[wanted] for wanted in part.wanted} for name, part in parts.items()}).static_order())
    except CycleError as error:
        circle = " → ".join(error.args[1])
        _wrong("parts", f"{circle}: each waits in every step for what the one before it sends; leave one of these out")


def _takes(function: object, arguments: int) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in callables do not tell
        return True
    return True


def _wrong(argument: str, what: str) -> NoReturn:
    raise JobError(f"collaborate: {argument}: {what}")
