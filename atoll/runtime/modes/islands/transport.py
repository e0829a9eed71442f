"""Messages of rounds on the fabric: what arrives is checked, and nobody can speak for another."""

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec

from atoll.control.messages import Message
from atoll.control.rounds import RoundSettings
from atoll.control.rounds.messages import (
    FetchGlobal,
    FetchUpdate,
    GlobalChunk,
    RoundAnnounce,
    SiteBeat,
    UpdateChunk,
    why_no_round_message,
)
from atoll.errors import RefusedError
from atoll.fabric.service import CallingPeer, allowed, carries
from atoll.privacy.border import Content
from atoll.runtime.modes.islands.borders import content_of_round
from atoll.runtime.modes.swarm.transport import FabricTransport

__all__ = ["RoundLetter", "RoundService", "RoundTransport", "check_round_sender"]

AnyRoundMessage: TypeAlias = FetchGlobal | FetchUpdate | GlobalChunk | RoundAnnounce | SiteBeat | UpdateChunk


class RoundLetter(msgspec.Struct, frozen=True, array_like=True):
    """A message between sites."""

    message: AnyRoundMessage


def check_round_sender(message: Message, name: str, role: str) -> None:
    """RefusedError unless this member may send this message."""
    if (role == "coordinator") != isinstance(message, RoundAnnounce):
        raise RefusedError(f"{name} is a {role}, which sends no {type(message).__name__}")
    named = getattr(message, "process", name)
    if named != name:
        raise RefusedError(f"{name} sent a {type(message).__name__} in the name of {named}")


def _content(letter: RoundLetter) -> Content | None:
    return content_of_round(letter.message)


class RoundService:
    """Where messages arrive. `arrived` is called in the fabric's loop; `why_unfit` says what is wrong with numbers in a message, and
    `refused` is told of a message that cannot be meant: from whom, its role, and why."""

    def __init__(
        self,
        arrived: Callable[[Message], None],
        settings: RoundSettings,
        why_unfit: Callable[[Message], str | None] = lambda message: None,
        refused: Callable[[str, str, str], None] = lambda name, role, why: None,
    ) -> None:
        self._arrived, self._settings, self._why_unfit, self._refused = arrived, settings, why_unfit, refused

    @allowed("coordinator", "worker")
    @carries(request=_content)
    async def deliver(self, letter: RoundLetter, peer: CallingPeer) -> None:
        """One message; that it was taken means nothing more."""
        message: Message = letter.message
        check_round_sender(message, peer.name, peer.role)
        unsound = why_no_round_message(message, self._settings) or self._why_unfit(message)
        if unsound is not None:
            self._refused(peer.name, peer.role, f"{type(message).__name__}: {unsound}")
            raise RefusedError(f"{peer.name} sent a {type(message).__name__} that cannot be meant: {unsound}")
        self._arrived(message)


class RoundTransport(FabricTransport):
    """Sends messages of rounds to whoever has a name."""

    large = (UpdateChunk, GlobalChunk)

    def call(self, to: str, message: Message) -> tuple[Callable[..., Any], Any]:
        """As the service above takes it."""
        return RoundService.deliver, RoundLetter(cast(AnyRoundMessage, message))

    async def _coded(self, to: str, message: Message) -> Message:
        return message  # updates are encoded by who makes them
