"""Where data that is read in order is after each step: the feeder says it to the coordinator, whose checkpoints keep it.

Data of its own state (`state_dict`) is gone on with there, by a run that is resumed and by a feeder in another's place, instead of being
read from its beginning. A place that is lost costs reading on from the one before; the samples are the same.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.data import Samples
from atoll.errors import CheckpointError, FabricError
from atoll.fabric.remote import Remote
from atoll.fabric.service import CallingPeer, allowed
from atoll.runtime.checkpoint.directory import candidates
from atoll.runtime.checkpoint.manifest import read_manifest, read_state
from atoll.runtime.checkpoint.values import data_state, from_plain
from atoll.runtime.modes.swarm.spec import Nothing

__all__ = ["RemotePlaces", "StreamPlaces", "ToldPlaces", "saved_places"]

_MOST = 64  # places that are known; of more, the older ones are thinned out
_UNSENT = 4
_TELL_SECONDS = 10.0
_ASK_SECONDS = 60.0


class ToldPlaces(msgspec.Struct, frozen=True):
    """Numbers of steps made, and for each where the data is then: JSON of a `StreamState` as a checkpoint keeps it."""

    steps: tuple[int, ...]
    places: list[Tensor]


def _sent(places: Mapping[int, Any]) -> ToldPlaces:
    contents = [torch.frombuffer(bytearray(msgspec.json.encode(place)), dtype=torch.uint8) for place in places.values()]
    return ToldPlaces(tuple(places), contents)


class StreamPlaces:
    """What is known of it, by the coordinator. `known` are those of checkpoints, by the steps made."""

    def __init__(self, known: Mapping[int, Any]) -> None:
        self._places = dict(known)

    @allowed("feeder")
    async def tell(self, told: ToldPlaces, peer: CallingPeer) -> None:
        """Where the data is after these steps."""
        for step, place in zip(told.steps, told.places, strict=True):
            self._places[step] = msgspec.json.decode(place.contiguous().numpy().tobytes())
        if len(self._places) > _MOST:
            for step in sorted(self._places)[1 : -_MOST // 2 : 2]:
                del self._places[step]

    @allowed("feeder")
    async def ask(self, request: Nothing, peer: CallingPeer) -> ToldPlaces:
        """All that is known."""
        return _sent(self._places)

    def remind(self, samples: Samples) -> None:
        """Have data know them."""
        for place in self._places.values():
            samples.go_on_from(from_plain(place, "the data's state"))

    def before(self, step: int) -> Any:
        """The last place known that is not after that step; None: the data says nothing of itself, or nothing was heard."""
        return self._places.get(max((known for known in self._places if known <= step), default=-1))


def saved_places(checkpoints: Path, batch_size: int) -> dict[int, Any]:
    """Those that a run's checkpoints have; of one that is damaged, others tell."""
    found: dict[int, Any] = {}
    for path in candidates(checkpoints, None):
        with suppress(CheckpointError):
            place = read_state(path, read_manifest(path)).extra.get("data")
            if place is not None:
                found[int(place["position"]) // batch_size] = place
    return found


class RemotePlaces:
    """A feeder's way to them. What the coordinator did not hear is told with the next."""

    def __init__(self, coordinator: Remote, warn: Callable[[str], None]) -> None:
        self._coordinator, self._warn = coordinator, warn
        self._unsent: dict[int, Any] = {}
        self._unsaved = False  # whether it was said that the state cannot be saved

    async def tell(self, step: int, state: Mapping[str, Any]) -> None:
        """Where the data is after so many steps."""
        try:
            place = data_state(state)
        except CheckpointError as error:
            if not self._unsaved:
                self._warn(f"{error}; a run that is resumed reads the data from its beginning")
            self._unsaved = True
            return
        if place is None:
            return
        self._unsent[step] = place
        while len(self._unsent) > _UNSENT:
            del self._unsent[min(self._unsent)]
        sent = dict(self._unsent)
        with suppress(FabricError):
            await asyncio.wrap_future(self._coordinator.call_soon(StreamPlaces.tell, _sent(sent), timeout_seconds=_TELL_SECONDS))
            self._unsent = {step: place for step, place in self._unsent.items() if step not in sent}

    async def ask(self) -> Sequence[dict[str, Any]]:
        """All that are known."""
        try:
            told = await asyncio.wrap_future(self._coordinator.call_soon(StreamPlaces.ask, Nothing(), timeout_seconds=_ASK_SECONDS))
        except FabricError:
            return ()  # it is read from its beginning
        plain = [msgspec.json.decode(place.contiguous().numpy().tobytes()) for place in told.places]
        return [from_plain(place, "the data's state") for place in plain]
