"""Top logits: probabilities that arrive, against a softmax in float64; bytes a position; what no encoder writes is refused."""

import math

import pytest
import torch
from torch import Tensor

from atoll.codec.base import Encoded
from atoll.codec.registry import decode, make_codec, parts_of
from atoll.errors import CodecError, NonFiniteTensorError


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 3).to(dtype)


@pytest.mark.parametrize(("words", "nbytes"), [(17, 29), (40, 31), (1000, 39), (32000, 49), (65536, 51)])
def test_a_position_takes_so_many_bytes(words: int, nbytes: int) -> None:
    encoded = make_codec("top-logits:16").encode(logits(4, 8, words))
    assert encoded.nbytes == 32 * nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [1, 2, 16, 39])
def test_probabilities_arrive(kept: int, dtype: torch.dtype) -> None:
    given = logits(5, 3, 40, dtype=dtype)
    arrived = decode(make_codec(f"top-logits:{kept}").encode(given))
    assert (arrived.shape, arrived.dtype) == (given.shape, dtype)
    wanted, found = given.double().softmax(-1), arrived.double().softmax(-1)
    order = (wanted + 1e-9 * found).argsort(-1, descending=True)  # of equal ones any may be kept
    wanted, found = wanted.gather(-1, order), found.gather(-1, order)
    spread = float((given.double().amax(-1) - given.double().amin(-1)).max())
    bound = spread / 255 + 0.02 * (dtype not in (torch.float32, torch.float64))  # half a step of 255, and what others' rounding does to it
    assert torch.allclose(found[..., :kept], wanted[..., :kept], rtol=bound, atol=1e-3)
    rest = wanted[..., kept:].sum(-1)
    assert torch.allclose(found[..., kept:].sum(-1), rest, rtol=bound, atol=1e-3)
    assert bool((found[..., kept:] == found[..., kept : kept + 1]).all())


def test_what_is_impossible_stays_so() -> None:
    given = logits(2, 30)
    given[0, 5:] = -math.inf
    arrived = decode(make_codec("top-logits:8").encode(given)).softmax(-1)
    assert torch.allclose(arrived[0, :5], given[0].softmax(-1)[:5], atol=0.15)  # steps are those of a spread of 128
    assert float(arrived[0, 5:].sum()) < 1e-6
    assert torch.equal(decode(make_codec("top-logits:8").encode(torch.zeros(2, 30))), torch.zeros(2, 30))


def test_other_tensors_travel_exactly() -> None:
    codec = make_codec("top-logits:16")
    for tensor in (torch.arange(100).view(2, 50), logits(4, 16), torch.tensor(3.0), torch.zeros(0, 40), torch.zeros(3, 0)):
        encoded = codec.encode(tensor)
        assert encoded.header.codec == "none"
        assert torch.equal(decode(encoded), tensor)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    given = logits(3, 40)
    given[1, 4] = value
    with pytest.raises(NonFiniteTensorError):
        make_codec("top-logits:4").encode(given)


def test_what_no_encoder_writes_is_refused() -> None:
    encoded = make_codec("top-logits:4").encode(logits(3, 40))
    names = [part.name for part in parts_of(encoded.header)]
    for name, value, words in (
        ("indices", 255, "beyond the 40 values"),
        ("scales", math.inf, "is not finite"),
        ("rests", math.nan, "is not"),
    ):
        parts = [torch.full_like(part, value) if name == own else part for own, part in zip(names, encoded.parts, strict=True)]
        with pytest.raises(CodecError, match=words):
            decode(Encoded(encoded.header, parts))
    with pytest.raises(CodecError, match="keeps from 1 to 4096"):
        make_codec("top-logits:0")
    with pytest.raises(CodecError, match="not a whole number; write top-logits:16"):
        make_codec("top-logits:x")
    with pytest.raises(CodecError, match="depends on its last dimension"):
        _ = make_codec("top-logits:4").spec
