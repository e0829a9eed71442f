"""What callbacks remember in a run of sites: they hear events in the coordinator's process, and sites save the checkpoints."""

from typing import Any

import msgspec

from atoll.callbacks import Callback, callback_states, restore_callbacks
from atoll.events import AnyEvent, CheckpointSaved
from atoll.runtime.checkpoint.state_file import newest_whole
from atoll.runtime.modes.islands.resume import read_beginning
from atoll.runtime.run_directory import RunDirectory

__all__ = ["CallbackMemory"]

_FILE = "callbacks.msgpack"


class _Kept(msgspec.Struct):
    start: int
    step: int
    states: dict[str, Any]


class CallbackMemory:
    """Kept in the run's directory whenever a checkpoint is saved. `start` is how often the run was started before."""

    def __init__(self, directory: RunDirectory, callbacks: tuple[Callback, ...], start: int) -> None:
        self._directory, self._callbacks, self._start = directory, callbacks, start

    def keep(self, event: AnyEvent) -> None:
        """A checkpoint was saved, if that is what the event tells: what they know now is of its step, or of a few later."""
        if isinstance(event, CheckpointSaved) and (states := callback_states(self._callbacks)):
            self._directory.write(_FILE, msgspec.msgpack.encode(_Kept(self._start, event.step, states)))

    def remind(self) -> None:
        """Of what they knew when the checkpoint was saved that the run goes on from, or the last one of this start."""
        path, beginning = self._directory.path / _FILE, read_beginning(self._directory)
        kept = msgspec.msgpack.decode(path.read_bytes(), type=_Kept) if path.exists() else None
        if kept is not None and (kept.start == self._start or (beginning.step and kept.step == beginning.step)):
            restore_callbacks(self._callbacks, kept.states)
        elif beginning.step:
            found = newest_whole(self._directory.checkpoints)
            restore_callbacks(self._callbacks, found.extra.get("callbacks", {}) if found is not None else {})
