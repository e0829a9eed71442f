"""Gradients of a step, added up over sites bucket by bucket: what the rank 0 of a site keeps of them, and its thread that encodes and adds.

    t = S + e;   q = Q(t);   e = t − Q⁻¹(q);   the gradient = Σ Q⁻¹(q) over all sites, in their order

S is a site's own sum for a bucket, divided by nothing but what a mean over the global batch is divided by. Every site decodes every q, its
own included, and adds in fp32 in one order, so that all sites have the same gradient to the bit, and what a codec left out is in the next.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from atoll.codec.base import Codec, Encoded, Header
from atoll.codec.registry import decode
from atoll.errors import CodecError, JobFailedError
from atoll.runtime.nonfinite import not_finite

__all__ = ["EncodedBucket", "GradientSums", "Slot", "StepNumbers"]

Slot: TypeAlias = tuple[str, int]
"""A parameter in a bucket, and how many elements it has."""

_LOOK_SECONDS = 0.2
_LONGEST_SECONDS = 3600.0  # that a site may take for a step while it is heard: for an evaluation, or its data


class EncodedBucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site's sum for a bucket, as it travels."""

    step: int  # of this start of the run, from 1
    bucket: int
    has_gradient: bytes  # 1 or 0 for each slot
    header: Header
    parts: tuple[Tensor, ...]


class StepNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some numbers of a site, which all sites tell each other."""

    number: int  # how many exchanges of numbers were before
    values: tuple[float, ...]
    text: str = ""


@dataclass
class _Bucket:
    slots: Sequence[Slot]
    buffer: Tensor
    elements: int
    step: int = 0  # in which it was begun last
    owed: Tensor | None = None  # e
    arrived: dict[int, dict[str, tuple[Tensor, bytes]]] = field(default_factory=dict)  # by step and site
    sums: dict[int, tuple[Tensor, bytes]] = field(default_factory=dict)


class GradientSums:
    """What is exchanged; who carries it is told `send`, in any thread. All methods may be called in any thread."""

    def __init__(self, sites: Sequence[str], own: str, codec: Codec, base: Callable[[], int]) -> None:
        """`sites` are all, in the order in which they are added up; `base` is how many steps the run had before this start of it."""
        self.sites, self.own, self.waited_seconds = tuple(sites), own, 0.0
        self.send: Callable[[EncodedBucket | StepNumbers], None] = lambda part: None
        self._codec, self._base = codec, base
        self._buckets: dict[int, _Bucket] = {}
        self._numbers: dict[int, dict[str, StepNumbers]] = {}
        self._asked = self._shared = 0  # exchanges of numbers: begun, and over
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="atoll-gradients", daemon=True)
        self._thread.start()

    # ---- for the training's thread

    def add(self, bucket: int, slots: Sequence[Slot], buffer: Tensor) -> None:
        """There is such a bucket."""
        self._buckets[bucket] = _Bucket(slots, buffer, sum(size for _, size in slots))

    def begin(self, bucket: int, ready: Callable[[], object]) -> None:
        """The site's own sum is in the bucket's buffer once `ready` returns."""
        one = self._buckets[bucket]
        with self._changed:
            one.sums.clear()
            one.step += 1
            step = one.step
        self._jobs.put(lambda: self._encode(bucket, one, step, ready))

    def finish(self, bucket: int) -> None:
        """Waits until the sum over all sites is in the buffer."""
        one = self._buckets[bucket]
        self._wait(lambda: one.step in one.sums, lambda: one.arrived.get(one.step, {}))
        total, has_gradient = one.sums[one.step]
        with torch.no_grad():
            one.buffer[: one.elements].copy_(total)
            one.buffer[one.elements :].copy_(torch.tensor(list(has_gradient)))

    def share(self, values: Sequence[float], text: str = "") -> list[StepNumbers]:
        """What all sites say at this point, in their order. Every site calls this equally often."""
        self._asked += 1
        number = self._asked
        own = StepNumbers(number, tuple(values), text)
        self.numbers_arrived(self.own, own)
        self.send(own)
        known = self._numbers[number]
        self._wait(lambda: len(known) == len(self.sites), lambda: known)
        with self._changed:
            del self._numbers[number]
            self._shared = number
        return [known[site] for site in self.sites]

    def owed(self) -> dict[str, Tensor]:
        """What the codec has left out so far, by parameter: of steps that are over."""
        found: dict[str, Tensor] = {}
        for bucket in self._buckets.values():
            if bucket.owed is not None:
                parts = torch.split(bucket.owed, [size for _, size in bucket.slots])
                found |= {name: part.clone() for (name, _), part in zip(bucket.slots, parts, strict=True)}
        return found

    def owe(self, owed: Mapping[str, Tensor]) -> None:
        """Begin with what was left out before; nothing of what is not named."""
        for bucket in self._buckets.values():
            rows = [owed[name].reshape(-1).float() if name in owed else torch.zeros(size) for name, size in bucket.slots]
            bucket.owed = torch.cat(rows)

    def shape(self) -> str:
        """The same at all sites, or they cannot train together."""
        return "; ".join(
            f"{number}: {bucket.buffer.dtype} {' '.join(f'{name}={size}' for name, size in bucket.slots)}"
            for number, bucket in sorted(self._buckets.items())
        )

    def _wait(self, done: Callable[[], bool], known: Callable[[], Mapping[str, object]]) -> None:
        began = time.monotonic()
        with self._changed:
            while not done():
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_LOOK_SECONDS)
                if time.monotonic() - began > _LONGEST_SECONDS:
                    missing = " and ".join(site for site in self.sites if site not in known())
                    raise JobFailedError(
                        f"{self.own} has waited {_LONGEST_SECONDS:.0f} s for {missing or 'itself'}, which is heard but sends nothing"
                    )
        self.waited_seconds += time.monotonic() - began

    # ---- for whoever carries what is exchanged

    def awaited(self) -> list[str]:
        """Sites that something is missing of now."""
        with self._changed:
            known = [one.arrived.get(one.step, {}) for one in self._buckets.values() if one.step not in one.sums]
            begun = [row for row in known if self.own in row] + [row for row in self._numbers.values() if self.own in row]
            return [site for site in self.sites if any(site not in row for row in begun)]

    def fail(self, error: BaseException) -> None:
        """The training hears it where it waits."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def why_unfit(self, part: EncodedBucket) -> str | None:
        """What is wrong with the form of something that arrived."""
        one = self._buckets.get(part.bucket)
        if one is None:
            return f"there is no bucket {part.bucket}"
        if part.step > one.step + 1:
            return f"it is of step {part.step}, and this site is at step {one.step}"
        if part.header.dtype != "float32" or part.header.shape != (one.elements,) or part.header.codec not in ("none", self._codec.name):
            return f"it has the form {list(part.header.shape)} of {part.header.dtype} in {part.header.codec}, not {one.elements} numbers"
        if len(part.has_gradient) != len(one.slots) or any(flag > 1 for flag in part.has_gradient):
            return "it does not say who has a gradient"
        return None

    def decoded(self, part: EncodedBucket) -> Tensor:
        """Its numbers; CodecError where they are none."""
        values = decode(Encoded(part.header, part.parts))
        if not bool(torch.isfinite(values).all()):
            raise CodecError("its numbers are not finite")
        return values

    def arrived(self, site: str, part: EncodedBucket, values: Tensor) -> None:
        """Another site's sum; nothing happens where it came before."""
        one = self._buckets[part.bucket]
        self._jobs.put(lambda: self._have(one, part.step, site, values, part.has_gradient))

    def numbers_arrived(self, site: str, numbers: StepNumbers) -> None:
        """What a site says, this one or another."""
        with self._changed:
            if self._shared < numbers.number <= self._asked + 1:
                self._numbers.setdefault(numbers.number, {})[site] = numbers
                self._changed.notify_all()

    def close(self) -> None:
        """No step follows."""
        self._jobs.put(None)

    # ---- in the thread of its own

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # the training would wait for ever
                self.fail(error)

    @torch.no_grad()
    def _encode(self, number: int, one: _Bucket, step: int, ready: Callable[[], object]) -> None:
        ready()
        row = one.buffer.detach().to("cpu", torch.float32, copy=True)
        total, has_gradient = row[: one.elements], bytes(int(each > 0) for each in row[one.elements :].tolist())
        if one.owed is not None:
            total += one.owed
        if not bool(torch.isfinite(total).all()):
            raise not_finite(self._base() + step, f"gradient of {self.own}", float("nan"))
        encoded = self._codec.encode(total)
        values = decode(encoded)
        one.owed = total - values
        self.send(EncodedBucket(step, number, has_gradient, encoded.header, encoded.parts))
        self._have(one, step, self.own, values, has_gradient)

    @torch.no_grad()
    def _have(self, one: _Bucket, step: int, site: str, values: Tensor, has_gradient: bytes) -> None:
        if step in one.sums or step < one.step:
            return
        rows = one.arrived.setdefault(step, {})
        rows.setdefault(site, (values, has_gradient))
        if len(rows) < len(self.sites):
            return
        total = rows[self.sites[0]][0].clone()
        for each in self.sites[1:]:
            total += rows[each][0]
        somewhere = bytes(max(flags) for flags in zip(*(row[1] for row in rows.values()), strict=True))
        with self._changed:
            del one.arrived[step]
            one.sums[step] = total, somewhere
            self._changed.notify_all()
