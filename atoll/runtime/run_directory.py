"""A run's directory: everything about the run, for those who continue it, report on it or export its weights.

run.json          what was started: the script, its arguments, the mode and its options, how often to save
plan.json         what runs where
cluster.toml      the devices it was planned for
predicted.json    what the cost model expected
events.jsonl      what happened
measured/         what each rank measured
audit/            what crossed a site's border, by process, where a border is watched
checkpoints/      the weights and everything else a run continues from

Small files that a run is continued from (run.json, plan.json, cluster.toml; a swarm's swarm.json and started.json) begin with a checksum of
the rest. A file without one is taken as it is: an earlier Atoll wrote it, or somebody who changed it and took the checksum out.
"""

import fcntl
import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from atoll.cluster import Cluster, load_cluster
from atoll.errors import AtollError, JobError
from atoll.plan import Plan
from atoll.plan.modes import default_rules

__all__ = ["LOCK", "SPEEDS", "RunDirectory", "RunSettings", "is_held", "run_lock", "with_checksum"]

LOCK = "lock"
SPEEDS = "ATOLL_SPEEDS"  # in the environment: the cluster file whose speeds are imposed
_TAIL_BYTES = 1 << 16  # more than any event has
_CHECKSUM = re.compile(rb'(?:(\{)\s*"sha256"\s*:\s*"|# sha256: )([0-9a-f]{64})(?(1)"\s*,|\n)')  # what a file begins with

T = TypeVar("T")
Options = TypeVar("Options", bound=msgspec.Struct)


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was started with."""

    format: int = 1
    script: str  # absolute path
    arguments: tuple[str, ...] = ()
    own_loop: bool = False  # the script makes the steps itself (`atoll.step`), so its processes execute it
    mode: str = msgspec.field(default_factory=lambda: default_rules().name)
    checkpoint_every: int | None = None  # steps; None: at the end only
    keep_last: int = 2
    profile: bool = False
    codec: str = "none"  # of activations and their gradients on links: what `--codec` said
    speeds: str | None = None  # a cluster file: ranks compute no faster than its devices would
    trial_seconds: float | None = None  # this run only finds out, for about so long, what a step takes: nothing is told and nothing kept
    options: dict[str, Any] = msgspec.field(default_factory=dict)  # the mode's own, as its rules' options struct has them

    def options_as(self, kind: type[Options]) -> Options:
        """The mode's own options, typed; those that were not given have their defaults."""
        return msgspec.convert(self.options, kind)


def with_checksum(content: bytes) -> bytes:
    """A small file that notices when one bit of it changes: JSON gets an entry `sha256`, TOML a comment."""
    if content.startswith(b"{"):
        rest = content[1:] if content[1:2] == b"\n" else b"\n" + content[1:]
        return b'{"sha256": "%s",%s' % (hashlib.sha256(rest).hexdigest().encode(), rest)
    return b"# sha256: %s\n%s" % (hashlib.sha256(content).hexdigest().encode(), content)


def _checked(path: Path, data: bytes) -> bytes:
    """What `with_checksum` was given; a file without a checksum is taken as it is. JobError where it is not what was written."""
    found = _CHECKSUM.match(data)
    if found is None and b"sha256" not in data[:32]:
        return data
    rest = data[found.end() :] if found is not None else b""
    if found is None or hashlib.sha256(rest).hexdigest() != found[2].decode():
        what = "it is not what was written: its checksum differs; restore it from a copy"
        raise JobError(f"{path}: {what}. If you changed it yourself, remove sha256 from it, and it is used as it is")
    return b"{" + rest if found[1] else rest


class _Moment(msgspec.Struct):
    at_seconds: float


class RunDirectory:
    """Paths and files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.events = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.measured = self.path / "measured"
        self.audit = self.path / "audit"
        self.cluster = self.path / "cluster.toml"
        self.predicted = self.path / "predicted.json"

    def check_new(self) -> None:
        """A directory that holds a run already is refused."""
        if (self.path / "run.json").exists() or self.events.exists():
            advice = f"choose another (--out, in Python out=), or continue that run (--resume {self.path}, in Python resume=)"
            raise JobError(f"{self.path}: holds a run already; {advice}")

    def create(self, settings: RunSettings) -> None:
        """Make a new run here; a directory that holds one already is refused."""
        self.check_new()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AtollError(f"{self.path}: cannot make the directory: {(error.strerror or str(error)).lower()}") from None
        self.write_settings(settings)

    @contextmanager
    def must_take(self) -> Iterator[None]:
        """What a run cannot begin without is written inside; a full disk, say, is an error in a sentence."""
        try:
            yield
        except OSError as error:
            raise AtollError(f"{self.path}: cannot write the run there: {error.strerror or error}") from error

    def write_settings(self, settings: RunSettings) -> None:
        """Say what is run."""
        with self.must_take():
            self.write("run.json", with_checksum(msgspec.json.format(msgspec.json.encode(settings), indent=1)))

    def settings(self) -> RunSettings:
        """What was started."""
        return self.read_as("run.json", RunSettings)

    def write_plan(self, plan: Plan) -> None:
        """Say what runs where."""
        with self.must_take():
            self.write("plan.json", with_checksum(f"{plan.to_json()}\n".encode()))

    def plan(self) -> Plan:
        """What runs where."""
        return Plan.from_json(self.read("plan.json"), str(self.path / "plan.json"))

    def load_cluster(self) -> Cluster | None:
        """The devices it was planned for, where they are known."""
        if not self.cluster.exists():
            return None
        self.read(self.cluster.name)  # as it was written
        return load_cluster(self.cluster)

    def last_moment(self) -> float:
        """`at_seconds` of the last event, which a run that is continued goes on from; 0 when there is none."""
        try:
            with self.events.open("rb") as file:
                file.seek(max(0, self.events.stat().st_size - _TAIL_BYTES))
                lines = file.read().split(b"\n")[:-1]  # the last may have been cut short
            return msgspec.json.decode(lines[-1], type=_Moment).at_seconds if lines else 0.0
        except (OSError, msgspec.DecodeError):  # whoever reads the events says what is wrong with them
            return 0.0

    def forget(self, *names: str) -> None:
        """Remove what is no longer true."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def write(self, name: str, content: bytes | str) -> None:
        """A file that is whole or not there."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """A file of the run, without its checksum; an error says what a run's directory is."""
        try:
            return _checked(self.path / name, (self.path / name).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            what = f"is no run's directory: {name} is missing" if self.path.is_dir() else "there is no such directory"
            what = "is a file, not a run's directory" if self.path.is_file() else what
            raise JobError(f"{self.path}: {what}; `atoll run SCRIPT --out DIRECTORY`, or job.run(out=…), makes one") from None
        except OSError as error:
            raise JobError(f"{self.path / name}: cannot read it: {(error.strerror or str(error)).lower()}") from None

    def read_as(self, name: str, kind: type[T]) -> T:
        """A file of the run, decoded from JSON."""
        try:
            return msgspec.json.decode(self.read(name), type=kind)
        except (msgspec.DecodeError, UnicodeError) as error:
            why = f"another version of Atoll wrote it, or it was changed since ({error})"
            raise JobError(f"{self.path / name}: {why}; go on with that version, or start a new run") from None


class _Holder(msgspec.Struct):
    pid: int
    host: str


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold the run's directory, which is made if need be, so that two runs never write into one. JobError where another process holds it.

    The kernel keeps the lock with the open file, so it ends with the process, however that ends; what the file says is only for people.
    """
    path = directory / LOCK
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise AtollError(f"{directory}: cannot write the run there: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            under_way = f"a run is under way in it{_holder(path)}"
            raise JobError(f"{directory}: {under_way}; wait until it has ended, or choose another directory") from None
        except OSError as error:
            raise AtollError(f"{path}: cannot lock it: {error.strerror or error}; choose a directory on another file system") from error
        with suppress(OSError):  # a full disk; the lock itself needs no room
            file.truncate(0)
            file.write(msgspec.json.encode(_Holder(os.getpid(), socket.gethostname())))
        yield


def is_held(directory: Path) -> bool | None:
    """Whether a process holds the run's directory; None where that cannot be told: it was last held on another host, or never."""
    path = directory / LOCK
    try:
        holder = msgspec.json.decode(path.read_bytes(), type=_Holder)
        if holder.host != socket.gethostname():
            return None
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return False


def _holder(path: Path) -> str:
    try:
        holder = msgspec.json.decode(path.read_bytes(), type=_Holder)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return f" (process {holder.pid} on {holder.host})"
