"""Listening: whether the coordinator of a swarm is there, as far as it can be told from here."""

import socket

import msgspec

from atoll.errors import AtollError
from atoll.runtime.run_directory import RunDirectory

__all__ = ["is_listening"]

_PATIENCE_SECONDS = 1.0


class _Start(msgspec.Struct):
    """Of what `atoll run` writes when it starts a swarm; the module that does needs PyTorch."""

    address: str


def is_listening(directory: RunDirectory) -> bool | None:
    """Whether somebody listens where the run's coordinator does; None where that is not known: it is no swarm, or cannot be reached."""
    if not (directory.path / "started.json").exists():
        return None
    try:
        host, _, port = directory.read_as("started.json", _Start).address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_SECONDS):
            return True
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError, AtollError):
        return None
