"""What a checkpoint says of itself: `manifest.json` (which run, which step), `index.json` (where each rectangle lies) and `state.json`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.rectangles import Rectangle, disjoint, whole
from atoll.runtime.checkpoint.safetensors_file import DTYPES, Entry, write_atomically

__all__ = [
    "INDEX",
    "MANIFEST",
    "STATE",
    "Chunk",
    "Index",
    "Manifest",
    "RunIdentity",
    "SmallState",
    "StoredTensor",
    "differences",
    "fingerprint",
    "model_shapes",
    "read_index",
    "read_manifest",
    "read_state",
    "write_description",
]

FORMAT = 1
MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
MODEL = "model/"  # what keys of parameters and buffers begin with

T = TypeVar("T")


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint belongs to. What must be the same to resume is compared; the rest is for people."""

    job: str
    optimizer: str  # class name
    seed: int
    batch_size: int
    plan: str = ""  # its text
    tied: dict[str, str] = {}  # other names of shared tensors → the name they are stored under
    model_config: dict[str, Any] | None = None  # of a Hugging Face model: `model.config.to_dict()`


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's first page; it is written last."""

    format: int
    step: int
    run: RunIdentity
    fingerprint: str  # of the tensors' names and shapes and the optimizer
    torch: str
    atoll: str
    unix_seconds: float
    ranks: int  # that wrote it
    sha256: dict[str, str]  # of the other JSON files


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A rectangle of a stored tensor and the file it is in, under the tensor's key."""

    rectangle: Rectangle
    file: str
    crc32: int | None = None  # of its bytes


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor on disk: its chunks are disjoint and together all of it."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        """Of the whole tensor."""
        return Entry(self.shape, self.dtype).size_bytes


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything is: tensors by key, files with their sizes in bytes."""

    tensors: dict[str, StoredTensor]
    files: dict[str, int]


class SmallState(msgspec.Struct, kw_only=True):
    """What is not tensors. `groups` are the optimizer's hyperparameters, `group_of` says which is each parameter's."""

    parameters: dict[str, dict[str, Any]] = {}  # by name: step counters and other small state of the optimizer
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    extra: dict[str, Any] = {}


def fingerprint(shapes: Mapping[str, tuple[int, ...]], optimizer: str) -> str:
    """A hash of what must be the same for a checkpoint to fit."""
    text = msgspec.json.encode([sorted((name, list(shape)) for name, shape in shapes.items()), optimizer])
    return hashlib.sha256(text).hexdigest()


def model_shapes(index: Index) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the user's parameters and buffers in a checkpoint."""
    return {key.removeprefix(MODEL): tensor.shape for key, tensor in index.tensors.items() if key.startswith(MODEL)}


def differences(stored: RunIdentity, now: RunIdentity) -> tuple[str, ...]:
    """What is not as it was, but need not be: sentences to show."""
    return tuple(
        f"the {what} was {old!r} and is {new!r}"
        for what, old, new in (
            ("job's name", stored.job, now.job),
            ("seed", stored.seed, now.seed),
            ("batch size", stored.batch_size, now.batch_size),
        )
        if old != new
    )


def write_description(directory: Path, manifest: Manifest, index: Index, state: SmallState) -> None:
    """The three JSON files, the manifest last."""
    texts = {INDEX: msgspec.json.encode(index), STATE: msgspec.json.encode(state)}
    for name, text in texts.items():
        write_atomically(directory / name, text)
    sealed = msgspec.structs.replace(manifest, sha256={name: hashlib.sha256(text).hexdigest() for name, text in texts.items()})
    write_atomically(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(sealed), indent=1))


def read_manifest(directory: Path) -> Manifest:
    """A checkpoint's manifest."""
    text = _read(directory / MANIFEST)
    version = _decode(directory / MANIFEST, text, dict[str, Any]).get("format")
    if version != FORMAT:
        raise CheckpointError(f"{directory / MANIFEST}: format {version!r}; this Atoll reads format {FORMAT}")
    return _decode(directory / MANIFEST, text, Manifest)


def read_state(directory: Path, manifest: Manifest) -> SmallState:
    """A checkpoint's small values."""
    return _decode(directory / STATE, _read_sealed(directory, STATE, manifest), SmallState)


def read_index(directory: Path, manifest: Manifest) -> Index:
    """Where a checkpoint's tensors are: checked to be complete and within the checkpoint's own files."""
    index = _decode(directory / INDEX, _read_sealed(directory, INDEX, manifest), Index)
    for name in index.files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{directory / INDEX}: {name!r} is not the name of a safetensors file in the checkpoint")
    for key, tensor in index.tensors.items():
        _check_tensor(directory / INDEX, key, tensor, index.files)
    return index


def _check_tensor(path: Path, key: str, tensor: StoredTensor, files: Mapping[str, int]) -> None:
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{path}: {key!r}: unknown dtype {tensor.dtype!r}")
    rectangles = [chunk.rectangle for chunk in tensor.chunks]
    inside = all(rectangle.inside(tensor.shape) for rectangle in rectangles)
    if not inside or sum(rectangle.elements for rectangle in rectangles) != whole(tensor.shape).elements or not disjoint(rectangles):
        raise CheckpointError(f"{path}: {key!r}: its chunks do not make up a tensor of shape {list(tensor.shape)}")
    for chunk in tensor.chunks:
        if chunk.file not in files:
            raise CheckpointError(f"{path}: {key!r}: it lies in {chunk.file!r}, which is not among the checkpoint's files")


def _read_sealed(directory: Path, name: str, manifest: Manifest) -> bytes:
    text = _read(directory / name)
    if hashlib.sha256(text).hexdigest() != manifest.sha256.get(name):
        raise CheckpointError(f"{directory / name}: it is not what was saved: its checksum differs from the one in {MANIFEST}")
    return text


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read it: {error.strerror or error}") from error


def _decode(path: Path, text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not what a checkpoint has there: {error}") from error
