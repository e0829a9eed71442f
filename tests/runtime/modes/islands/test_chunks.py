"""What comes from another site is looked at before anything is made of it."""

from typing import Any

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.control.messages import Message
from atoll.control.rounds.messages import (
    FetchUpdate,
    GlobalChunk,
    Offer,
    RoundSettings,
    SiteBeat,
    UpdateChunk,
    UpdateId,
    why_no_round_message,
)
from atoll.errors import RefusedError
from atoll.fabric.payload import decode_payload, encode_payload
from atoll.runtime.modes.islands.chunks import ChunkForm, packed
from atoll.runtime.modes.islands.transport import RoundLetter, check_round_sender

FORM = ChunkForm(10, 3)  # of 4, 4 and 2 numbers
UPDATE = UpdateId("oslo", 1, 1)


def chunk(values: list[float], codec: str = "int8") -> list[Any]:
    return packed(make_codec(codec).encode(torch.tensor(values)))


def test_a_row_is_cut_and_put_together() -> None:
    row = torch.arange(10.0)
    assert [part.tolist() for part in FORM.parts(row)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "2-bit", "top-k-2-bit:64"])
def test_what_every_codec_sends_is_taken_as_it_comes_from_the_fabric(codec: str) -> None:
    sent = encode_payload(RoundLetter(UpdateChunk(UPDATE, 1, chunk([1.0, -2.0, 3.0, 0.5], codec))))
    letter = decode_payload(sent.data, sent.tensors, RoundLetter)
    assert FORM.why_unfit(letter.message) is None
    assert FORM.is_update(letter.message.payload)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (UpdateChunk(UPDATE, 0, chunk([1.0, 2.0])), "not 4 numbers"),
        (UpdateChunk(UPDATE, 2, chunk([1.0, float("nan")], "none")), "its numbers are not finite"),
        (UpdateChunk(UPDATE, 2, chunk([float("inf"), 1.0])), "its numbers are not finite"),
        (UpdateChunk(UPDATE, 2, "x"), "it is no chunk of an update"),
        (UpdateChunk(UPDATE, 2, [b"{}"]), "its header cannot be read"),
        (UpdateChunk(UPDATE, 2, chunk([1.0, 2.0])[:-1]), "parts that arrived"),
        (GlobalChunk((0, 1), 2, [torch.zeros(2), torch.tensor([0.0, float("inf")])]), "it is no chunk of a state"),
        (GlobalChunk((0, 1), 0, [torch.zeros(2), torch.zeros(2)]), "it is no chunk of a state"),
        (GlobalChunk((0, 1), 2, [torch.zeros(2)]), "it is no chunk of a state"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(message: Message, said: str) -> None:
    assert said in (FORM.why_unfit(message) or "")


def test_a_state_is_taken() -> None:
    assert FORM.why_unfit(GlobalChunk((0, 1), 2, [torch.zeros(2), torch.ones(2)])) is None


def test_nobody_speaks_for_another() -> None:
    beat = SiteBeat("oslo", "oslo-1", 1, 1, 0, None, None, None, "", frozenset())
    check_round_sender(beat, "oslo-1", "worker")
    check_round_sender(FetchUpdate(UPDATE, 0, "rome"), "rome", "worker")
    refused: list[tuple[Message, str, str]] = [
        (beat, "rome", "worker"),
        (beat, "oslo-1", "coordinator"),
        (FetchUpdate(UPDATE, 0, "oslo"), "rome", "worker"),
    ]
    for message, name, role in refused:
        with pytest.raises(RefusedError):
            check_round_sender(message, name, role)


def test_an_offer_that_tells_of_steps_it_has_not_made_is_none() -> None:
    offer = Offer(UPDATE, 0, 0, 0, 1, 1.0, "d", ((1.0, 1.0), (1.0, 1.0)))
    beat = SiteBeat("oslo", "oslo", 1, 1, 1, (0, 0), offer, None, "", frozenset())
    assert why_no_round_message(beat, RoundSettings(rounds=1)) == "it tells of more steps than it has made"
