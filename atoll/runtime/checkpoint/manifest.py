"""What a checkpoint says of itself: `manifest.json` (which run, which step), `index.json` (where each rectangle lies) and `state.json`."""

import hashlib
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from atoll.errors import CheckpointError, DamagedCheckpointError
from atoll.model_identity import ModelIdentity
from atoll.runtime.checkpoint.rectangles import Rectangle, disjoint, whole
from atoll.runtime.checkpoint.safetensors_file import DTYPES, Entry, StoredFile, write_atomically

__all__ = [
    "EMA",
    "EMA_KEY",
    "INDEX",
    "OPTIMIZER",
    "MANIFEST",
    "STATE",
    "Chunk",
    "Index",
    "CheckpointManifest",
    "Rebuilt",
    "RunIdentity",
    "SmallState",
    "StoredTensor",
    "differences",
    "make_manifest",
    "merge_small",
    "model_shapes",
    "number_of",
    "read_index",
    "read_manifest",
    "read_state",
    "seal",
    "unseal",
    "write_description",
]

FORMAT = 2
MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
MODEL = "model/"  # what keys of parameters and buffers begin with
OPTIMIZER = "optimizer/"  # of the optimizer's state: then its name, a slash, and the parameter's name
EMA = "ema"  # what the averages of a parameter are called among the optimizer's state
EMA_KEY = f"{OPTIMIZER}{EMA}/"  # what keys of averaged weights begin with

T = TypeVar("T")


class RunIdentity(ModelIdentity, frozen=True, kw_only=True):
    """What a checkpoint belongs to. What must be the same to resume is compared; the rest is for people and for who exports it."""

    job: str
    optimizer: str  # class name
    seed: int
    batch_size: int
    plan: str = ""  # its text

    @classmethod
    def of(cls, model: ModelIdentity, *, job: str, optimizer: str, seed: int, batch_size: int, plan: str = "") -> "RunIdentity":
        """Of a run of that model."""
        fields: dict[str, Any] = {name: getattr(model, name) for name in ModelIdentity.__struct_fields__}
        return cls(job=job, optimizer=optimizer, seed=seed, batch_size=batch_size, plan=plan, **fields)


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
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
    crc32: int  # of its bytes


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor on disk: its chunks are disjoint and together all of it."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    chunks: tuple[Chunk, ...]
    copies: tuple[Chunk, ...] = ()  # the same numbers once more: parameters that several stages of a swarm use; checked, never read

    @property
    def size_bytes(self) -> int:
        """Of the whole tensor."""
        return Entry(self.shape, self.dtype).size_bytes


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter that is not stored: whoever loads the checkpoint has made it again, and compares (`checkpoint/rebuilt.py`)."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything is: tensors by key, and the files that must be there."""

    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]
    rebuilt: dict[str, Rebuilt] = {}  # by the user's names: what is nowhere, since the job makes it again


class SmallState(msgspec.Struct, kw_only=True):
    """What is not tensors. `groups` are the optimizer's hyperparameters, `group_of` says which is each parameter's."""

    parameters: dict[str, dict[str, Any]] = {}  # by name: step counters and other small state of the optimizer
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    extra: dict[str, Any] = {}


def _fingerprint(shapes: Mapping[str, tuple[int, ...]], optimizer: str) -> str:
    """A hash of what must be the same for a checkpoint to fit."""
    text = msgspec.json.encode([sorted((name, list(shape)) for name, shape in shapes.items()), optimizer])
    return hashlib.sha256(text).hexdigest()


def model_shapes(index: Index) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the user's parameters and buffers in a checkpoint, those included that it leaves out."""
    stored = {key.removeprefix(MODEL): tensor.shape for key, tensor in index.tensors.items() if key.startswith(MODEL)}
    return stored | {name: one.shape for name, one in index.rebuilt.items()}


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


def make_manifest(step: int, run: RunIdentity, index: Index, ranks: int) -> CheckpointManifest:
    """Of a checkpoint written now; the checksums of the other files come when they are written."""
    return CheckpointManifest(
        format=FORMAT,
        step=step,
        run=run,
        fingerprint=_fingerprint(model_shapes(index), run.optimizer),
        torch=str(torch.__version__),
        atoll=version("atoll"),
        unix_seconds=time.time(),
        ranks=ranks,
        sha256={},
    )


def write_description(directory: Path, manifest: CheckpointManifest, index: Index, state: SmallState) -> None:
    """The three JSON files, the manifest last."""
    texts = {INDEX: msgspec.json.encode(index), STATE: msgspec.json.encode(state)}
    for name, text in texts.items():
        write_atomically(directory / name, text)
    sealed = msgspec.structs.replace(manifest, sha256={name: hashlib.sha256(text).hexdigest() for name, text in texts.items()})
    write_atomically(directory / MANIFEST, seal(msgspec.json.format(msgspec.json.encode(sealed), indent=1)))


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    """A small file that notices when one bit of it changes."""

    sha256: str
    content: msgspec.Raw


def seal(content: bytes) -> bytes:
    """JSON with a checksum of its own: `{"sha256": …, "content": …}`."""
    return b'{"sha256":"%s","content":%s}' % (hashlib.sha256(content).hexdigest().encode(), content)


def unseal(path: Path, text: bytes) -> bytes:
    """What was sealed, or an error where a bit of it is not what was written."""
    content = bytes(_decode(path, text, _Sealed).content)
    if seal(content) != text:
        raise DamagedCheckpointError(f"{path}: it is not what was saved: its checksum differs")
    return content


def read_manifest(directory: Path) -> CheckpointManifest:
    """A checkpoint's manifest."""
    path = directory / MANIFEST
    text = _read(path)
    known = _decode(path, text, dict[str, Any])
    if "format" not in known:  # the format before this one had no seal
        content = unseal(path, text)
        known = _decode(path, content, dict[str, Any])
        if known.get("format") == FORMAT:
            return _decode(path, content, CheckpointManifest)
    raise CheckpointError(f"{path}: format {known.get('format')!r}; this Atoll reads format {FORMAT}")


def read_state(directory: Path, manifest: CheckpointManifest) -> SmallState:
    """A checkpoint's small values."""
    return _decode(directory / STATE, _read_sealed(directory, STATE, manifest), SmallState)


def read_index(directory: Path, manifest: CheckpointManifest) -> Index:
    """Where a checkpoint's tensors are: checked to be complete and within the checkpoint's own files."""
    index = _decode(directory / INDEX, _read_sealed(directory, INDEX, manifest), Index)
    for name in index.files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{directory / INDEX}: {name!r} is not the name of a safetensors file in the checkpoint")
    for key, tensor in index.tensors.items():
        _check_tensor(directory / INDEX, key, tensor, index.files)
    return index


def _check_tensor(path: Path, key: str, tensor: StoredTensor, files: Mapping[str, StoredFile]) -> None:
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{path}: {key!r}: unknown dtype {tensor.dtype!r}")
    rectangles = [chunk.rectangle for chunk in tensor.chunks]
    inside = all(rectangle.inside(tensor.shape) for rectangle in rectangles)
    if not inside or sum(rectangle.elements for rectangle in rectangles) != whole(tensor.shape).elements or not disjoint(rectangles):
        raise CheckpointError(f"{path}: {key!r}: its chunks do not make up a tensor of shape {list(tensor.shape)}")
    for chunk in (*tensor.chunks, *tensor.copies):
        if chunk.file not in files:
            raise CheckpointError(f"{path}: {key!r}: it lies in {chunk.file!r}, which is not among the checkpoint's files")


def _read_sealed(directory: Path, name: str, manifest: CheckpointManifest) -> bytes:
    text = _read(directory / name)
    if hashlib.sha256(text).hexdigest() != manifest.sha256.get(name):
        raise DamagedCheckpointError(f"{directory / name}: it is not what was saved: its checksum differs from the one in {MANIFEST}")
    return text


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot read it: {error.strerror or error}") from error


def _decode(path: Path, text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{path}: not what a checkpoint has there: {error}") from error


def number_of(groups: list[dict[str, Any]], options: dict[str, Any]) -> int:
    """Which of the groups has these options; it is added where none has."""
    if options not in groups:
        groups.append(options)
    return groups.index(options)


def merge_small(all_ranks: Iterable[SmallState], extra: dict[str, Any]) -> SmallState:
    """What all ranks know of their parameters, together."""
    merged = SmallState(extra=extra)
    for state in all_ranks:
        merged.parameters.update(state.parameters)
        numbers = [number_of(merged.groups, options) for options in state.groups]
        merged.group_of.update({name: numbers[number] for name, number in state.group_of.items()})
    return merged
