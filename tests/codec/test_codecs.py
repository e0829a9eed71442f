"""What holds for every codec: shapes and types come back, sizes are as announced, bytes are the same everywhere, nonsense is refused."""

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.codec.base import Encoded, Header
from atoll.codec.registry import decode, encoded_from, make_codec, parts_of, relative_error
from atoll.errors import CodecError
from tests.codec.tensors import CODEC_TEXTS, body_of, tensors


@given(tensors(), st.sampled_from(CODEC_TEXTS))
def test_a_tensor_travels_as_a_header_and_bytes(tensor: torch.Tensor, text: str) -> None:
    codec = make_codec(text)
    encoded = codec.encode(tensor)
    header = msgspec.msgpack.decode(msgspec.msgpack.encode(encoded.header), type=Header)
    received = Encoded(header, [torch.empty(part.elements, dtype=part.dtype) for part in parts_of(header)])
    for target, source in zip(received.buffers(), encoded.buffers(), strict=True):
        target[:] = source
    assert received.nbytes == encoded.nbytes == sum(part.nbytes for part in parts_of(header))
    body = encoded_from(header, torch.frombuffer(bytearray(body_of(encoded) or b"\0"), dtype=torch.uint8)[: encoded.nbytes])
    decoded = decode(encoded)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == tensor.dtype
    assert bool(decoded.isfinite().all())
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    assert torch.equal(decode(received, out), decoded)
    assert torch.equal(decode(body), decoded)


@given(tensors(), st.sampled_from(CODEC_TEXTS))
def test_strides_and_earlier_contents_of_buffers_do_not_matter(tensor: torch.Tensor, text: str) -> None:
    codec = make_codec(text)
    plain = codec.encode(tensor.contiguous())
    spaced = torch.stack([tensor, tensor + 1], -1)[..., 0]
    assert body_of(codec.encode(spaced)) == body_of(plain)
    other = codec.encode(torch.ones_like(tensor) * 3)
    if other.header.codec != "none":
        assert body_of(codec.encode(tensor, reuse=other)) == body_of(plain)
    out = torch.full((*tensor.shape, 2), 9.0, dtype=tensor.dtype)[..., 0]
    assert torch.equal(decode(plain, out), decode(plain))


@given(tensors(), st.sampled_from(CODEC_TEXTS))
def test_ordinary_tensors_have_the_ratio_the_codec_states(tensor: torch.Tensor, text: str) -> None:
    codec = make_codec(text)
    encoded = codec.encode(tensor)
    if not encoded.header.exact_blocks:
        header = codec.header_of(tuple(tensor.shape), tensor.dtype)
        nbytes = tensor.nbytes if header is None else sum(part.nbytes for part in parts_of(header))
        assert encoded.nbytes == nbytes <= tensor.nbytes


@pytest.mark.parametrize("text", CODEC_TEXTS)
def test_what_is_not_a_float_travels_exactly(text: str) -> None:
    for dtype in (torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16):
        tensor = torch.arange(600).remainder(2).to(dtype).view(20, 30)
        decoded = decode(make_codec(text).encode(tensor))
        assert decoded.dtype == dtype
        assert torch.equal(decoded.view(torch.uint8), tensor.view(torch.uint8))


def test_conjugated_views_travel_as_what_they_show() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(decode(make_codec("none").encode(tensor)), tensor)


@pytest.mark.parametrize("text", CODEC_TEXTS)
def test_parameters_that_require_gradients_are_encoded(text: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(40, 50))
    assert not decode(make_codec(text).encode(parameter)).requires_grad


@pytest.mark.parametrize("text", ["bf16", "fp16", "int8", "int4", "2-bit", "top-k:0.1", "top-k:0.01", "top-k-2-bit:64", "top-k-2-bit:1024"])
def test_codecs_state_the_ratio_and_the_error_that_are_measured(text: str) -> None:
    codec, tensor = make_codec(text), torch.randn(1024, 1024, generator=torch.Generator().manual_seed(3))
    encoded = codec.encode(tensor)
    assert codec.spec.ratio(4) == pytest.approx(encoded.ratio, rel=0.01)
    assert codec.spec.relative_error == pytest.approx(relative_error(tensor, decode(encoded)), rel=0.05)


DIGEST = """
import hashlib, torch
from atoll.codec.base import ErrorFeedback
from atoll.codec.registry import decode, make_codec
torch.set_num_threads({threads})
digest = hashlib.sha256()
values = (torch.arange(150 * 517, dtype=torch.int64) * 2654435761 % 1000003 - 500001).double().view(150, 517)
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    tensor = (values / 7 ** torch.arange(150).remainder(5).double()[:, None] / 1000).to(dtype)
    for text in {texts}:
        feedback = ErrorFeedback()
        for _ in range(2):
            encoded = make_codec(text).encode(tensor, feedback=feedback)
            digest.update(repr(encoded.header).encode() + b"".join(map(bytes, encoded.buffers())))
            digest.update(decode(encoded).view(torch.uint8).numpy().tobytes())
from atoll.runtime.outer_update import OuterState, OuterTerms, outer_step, weighted_mean
state = OuterState.beginning(values.view(-1).float())
for shift in (1, 2, 3):
    mean = weighted_mean([(3.0, values.view(-1).float() / 7), (7.0 * shift, values.view(-1).roll(shift).float() / 3)])
    outer_step(state, mean, OuterTerms(learning_rate=0.7, momentum=0.9))
digest.update(state.weights.numpy().tobytes() + state.momentum.numpy().tobytes())
print(digest.hexdigest())
"""


def test_bytes_and_decoded_values_are_the_same_on_other_processors_and_with_more_threads() -> None:
    """And what sites make of each other's updates. PyTorch and its matrix library can be told to use other instruction sets, which round
    sums differently."""
    digests = set()
    for capability, threads in (("default", 1), ("avx2", 2)):
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "passive",
            "ATEN_CPU_CAPABILITY": capability,
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2" if capability == "default" else "AVX2",
        }
        code = DIGEST.format(threads=threads, texts=CODEC_TEXTS)
        digests.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(digests) == 1
    assert len(next(iter(digests)).strip()) == hashlib.sha256().digest_size * 2


def test_threads_encode_at_once_and_the_callers_setting_stays() -> None:
    values = [torch.randn(300_000, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    codec = make_codec("int8")
    expected = [body_of(codec.encode(tensor)) for tensor in values]
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda tensor: body_of(codec.encode(tensor)), values)) == expected
        assert body_of(codec.encode(values[0])) == expected[0]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


HEADERS = st.builds(
    Header,
    codec=st.sampled_from(["none", "bf16", "fp16", "int8", "int4", "2-bit", "top-k", "top-k-2-bit", "zip"]),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "int64", "bool", "complex64", "object"]),
    shape=st.lists(st.integers(-1, 40), max_size=3).map(tuple),
    exact_blocks=st.integers(-1, 4),
    kept=st.integers(-1, 30),
)


@given(HEADERS, st.integers(0, 2**32), st.booleans())
def test_any_header_with_any_bytes_is_decoded_or_refused_in_words(header: Header, seed: int, small: bool) -> None:
    try:
        layout = parts_of(header)
    except CodecError:
        return
    nbytes = sum(part.nbytes for part in layout)
    assert nbytes <= 64 * (header.decoded_bytes + 4096)
    body = torch.randint(0, 2 if small else 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    try:
        assert decode(encoded_from(header, body)).shape == header.shape
    except CodecError:
        return


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("zip", "no codec"),
        ("top-k", "no codec"),
        ("top-k:x", "not a number"),
        ("top-k:0", "between"),
        ("low-rank:4", "no codec"),
        ("top-k-2-bit", "no codec"),
        ("top-k-2-bit:0.5", "not a whole number"),
        ("top-k-2-bit:4097", "1 to 4096"),
        ("int8:2", "no"),
    ],
)
def test_wrong_names_of_codecs_are_refused(text: str, word: str) -> None:
    with pytest.raises(CodecError, match=word):
        make_codec(text)


@pytest.mark.parametrize("text", CODEC_TEXTS)
def test_a_codec_is_written_as_it_is_read(text: str) -> None:
    assert make_codec(text).text == text
    assert text in repr(make_codec(text))


def test_wrong_targets_and_parts_are_refused() -> None:
    encoded = make_codec("int8").encode(torch.ones(1000))
    with pytest.raises(CodecError, match="cannot be decoded into"):
        decode(encoded, torch.empty(999))
    with pytest.raises(CodecError, match="parts that arrived"):
        decode(Encoded(encoded.header, encoded.parts[:-1]))
    with pytest.raises(CodecError, match="announces"):
        encoded_from(encoded.header, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(CodecError, match="cannot travel"):
        make_codec("int8").encode(torch.empty(3, dtype=torch.bits8))
    with pytest.raises(CodecError, match="compared"):
        relative_error(torch.ones(2), torch.ones(3))
