"""Placement: where what belongs on a plan's hosts is started: in the lab this process runs in, on this machine, or over ssh.

Hosts with an `address` in the cluster file are reached over ssh, unless the address is this machine's. Before anything is started there,
each is asked what a run needs: the same versions and script, a working directory, a way back to this machine, the run's directory where the
mode needs it. Everything that is wrong is told at once, a sentence for each host. `--sync` copies the script's directory there before.
"""

import contextlib
import hashlib
import json
import os
import platform
import secrets
import shlex
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from atoll.cluster import Cluster
from atoll.cluster.cluster import Host as ClusterHost
from atoll.errors import AtollError, ClusterError
from atoll.runtime.supervise.fork_server import ForkServer
from atoll.runtime.supervise.hosts import InLab, ProcessHost, ThisMachine, find_lab
from atoll.runtime.supervise.ssh import OverSsh, ssh_command
from atoll.units import plural

__all__ = ["Placement", "copy_directory", "place_processes"]

_LOOPBACK = "127.0.0.1"
_SSH_PORT = "22"
_REACH_SECONDS = 5.0
_PACKAGE = Path(__file__).parents[2]
_NOT_COPIED = (".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "runs")
_MAKE = "import os,shutil,sys;os.makedirs(os.path.expanduser(sys.argv[1]),exist_ok=True);print(bool(shutil.which('rsync')))"
_FREE = "import os,shutil,sys;print(shutil.disk_usage(os.path.expanduser(sys.argv[1])).free)"
_UNPACK = "import os,sys,tarfile;tarfile.open(fileobj=sys.stdin.buffer,mode='r|').extractall(os.path.expanduser(sys.argv[1]),filter='data')"

# Run by a host's Python, in no directory of its own. Only what every Python has, so that it can say that Atoll is missing.
_CHECK = """
import hashlib, importlib.util, json, os, platform, shutil, socket, sys
from importlib.metadata import PackageNotFoundError, version
asked = json.loads(sys.argv[1])
def digest(path):
    try: return hashlib.sha256(open(os.path.expanduser(path), "rb").read()).hexdigest()
    except OSError: return None
def installed(name):
    try: return version(name).split("+")[0]
    except PackageNotFoundError: return None
def package():
    found = importlib.util.find_spec("atoll")
    total = hashlib.sha256()
    for folder, folders, files in os.walk(os.path.dirname(found.origin) if found and found.origin else "/nowhere"):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"): total.update(digest(os.path.join(folder, name)).encode())
    return total.hexdigest()
def reached(address):
    try: socket.create_connection((address, asked["port"]), asked["seconds"]).close()
    except OSError: return False
    return True
directory = os.path.expanduser(asked["directory"])
print(json.dumps({
    "versions": {"python": ".".join(platform.python_version_tuple()[:2]), "torch": installed("torch"), "atoll": installed("atoll")},
    "package": package(),
    "directory": os.path.isdir(directory) and os.access(directory, os.R_OK | os.X_OK),
    "scripts": [digest(path) for path in asked["scripts"]],
    "shared": digest(asked["nonce"]) is not None,
    "reached": [address for address in asked["addresses"] if reached(address)],
}))
"""


class Placement(NamedTuple):
    """Where the processes of a run are started."""

    hosts: Mapping[str, ProcessHost]  # by the names of the cluster file
    address: str  # where all of them reach this process
    where: str  # in words
    scripts: Mapping[str, str]  # the script's path on hosts that have their own files
    here: ProcessHost  # this machine

    def close(self) -> None:
        """Ends connections, and what runs at their far ends."""
        for host in self.hosts.values():
            if isinstance(host, OverSsh):
                host.close()


def place_processes(
    names: Sequence[str],
    cluster: Cluster | None,
    environ: Mapping[str, str],
    *,
    script: Path,
    run: Path,
    sync: bool = False,
    shared: bool,
    say: Callable[[str], None],
    server: ForkServer | None = None,
) -> Placement:
    """Where what belongs on these hosts is started.

    That is in the lab this process runs in if they are in it, over ssh where they have addresses of other machines, else on this machine.
    `sync` copies the script's directory; with `shared` every host must see the run's directory. `server` forks processes of this machine.
    """
    lab = find_lab(environ)
    if lab is not None and all(name in lab.addresses for name in names):
        return Placement({name: InLab(name, server) for name in names}, lab.address, f"on hosts of {lab.name}", {}, ThisMachine(server))
    known = {host.name: host for host in (cluster.hosts if cluster is not None else ())}
    here = ThisMachine(server)
    hosts: dict[str, ProcessHost] = dict.fromkeys(names, here)
    remote: list[OverSsh] = []
    wanted = [known[name] for name in dict.fromkeys(names) if name in known]
    if any(host.address for host in wanted):
        _check_addresses(wanted)
        for host in wanted:
            if not _is_this_machine(host, environ):
                remote.append(OverSsh(host, environ, host.workdir or os.getcwd()))
                hosts[host.name] = remote[-1]
    if not remote:
        return Placement(hosts, _LOOPBACK, "on this machine", {}, here)
    try:
        if sync:
            for far in remote:
                say(f"copying {script.resolve().parent} to {far.name}:{far.directory}")
                copy_directory(far, script.resolve().parent, run)
        address, scripts = _checked(remote, script.resolve(), run, shared=shared, synced=sync)
    except BaseException:
        for far in remote:
            far.close()
        raise
    beside = " and this machine" if here in hosts.values() else ""
    return Placement(hosts, address, f"on {plural(len(remote), 'host')} over ssh{beside}", scripts, here)


def _check_addresses(hosts: Sequence[ClusterHost]) -> None:
    without = [host.name for host in hosts if not host.address]
    if without:
        raise ClusterError(
            f"host {without[0]!r} has no address, but others of the plan have: give each host its address in the cluster file "
            "('localhost' is this machine), or none, to start all of them on this machine"
        )


def _is_this_machine(host: ClusterHost, environ: Mapping[str, str]) -> bool:
    """Whether an address, as the user's ssh configuration has it, is this machine's. Behind another port may be a container."""
    name, port = host.address, _SSH_PORT
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        described = subprocess.run([*ssh_command(host, environ), "-G"], capture_output=True, text=True, timeout=10, check=True).stdout
        settings = dict(line.split(" ", 1) for line in described.splitlines() if " " in line)
        name, port = settings.get("hostname", name), settings.get("port", port)
    return port == _SSH_PORT and any(_is_own(address) for address in _addresses_of(name))


def _addresses_of(name: str) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)]
    except OSError:  # ssh says what is wrong with it
        return []


def _is_own(address: str) -> bool:
    """Whether it belongs to an interface of this machine: only then can it be bound."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return address not in ("0.0.0.0", "::")
    return False


def _own_addresses(hosts: Sequence[OverSsh]) -> list[str]:
    """Where hosts may reach this machine: as they see it, if that is an address of its own, and as it would reach them."""
    found = [seen for host in hosts if (seen := host.facts.client_address) and _is_own(seen)]
    for host in hosts:
        for address in _addresses_of(host.host.address):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing; only asks which way it would go
                found.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys(found))


def _checked(hosts: Sequence[OverSsh], script: Path, run: Path, *, shared: bool, synced: bool) -> tuple[str, dict[str, str]]:
    """An address of this machine that all of them reach, and where each has the script. AtollError says what is wrong, host by host."""
    for host in hosts:
        host.connect()  # all at once
    problems: list[str] = []
    answers: dict[str, dict[str, Any]] = {}
    scripts: dict[str, str] = {}
    reached: list[str] = []
    with socket.create_server(("", 0), backlog=1024) as listener, _nonce(run) as nonce:
        for host in hosts:
            candidates = _candidates(host, script, synced)
            try:
                reached = reached or _own_addresses(hosts)
                asked = {
                    "directory": host.directory,
                    "scripts": candidates,
                    "nonce": str(nonce),
                    "addresses": reached,
                    "port": listener.getsockname()[1],  # that they can try to reach
                    "seconds": _REACH_SECONDS,
                }
                answer = answers[host.name] = json.loads(host.ask(_CHECK, json.dumps(asked)))
            except AtollError as error:
                problems.append(str(error))
                continue
            digest = hashlib.sha256(script.read_bytes()).hexdigest()
            fitting = [path for path, found in zip(candidates, answer["scripts"], strict=True) if found == digest]
            problem = _problem(host, answer, script, run if shared else None, fitting)
            if problem is not None:
                problems.append(f"host {host.name!r}: {problem}")
                continue
            scripts[host.name] = fitting[0]
    common = [address for address in reached if all(address in answer["reached"] for answer in answers.values())]
    if not problems and not common:
        problems = [_unreached(host.name, reached) for host in hosts if not answers[host.name]["reached"]] or [
            f"no address of this machine ({', '.join(reached)}) is reached by all hosts; put them on one network"
        ]
    if problems:
        raise AtollError("\n".join(problems))
    return common[0], scripts


def _candidates(host: OverSsh, script: Path, synced: bool) -> list[str]:
    """Where the script may be on a host."""
    copied = f"{host.directory.rstrip('/')}/{script.name}"
    return [copied] if synced else [copied, str(script)]


def _problem(host: OverSsh, answer: Mapping[str, Any], script: Path, run: Path | None, fitting: Sequence[str]) -> str | None:
    """What is wrong there, in words."""
    ours = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": version("torch").split("+")[0], "atoll": version("atoll")}
    theirs = answer["versions"]
    remedy = "; install the same versions, or set `python` in the cluster file"
    missing = [name for name in ours if theirs[name] is None]
    if missing:
        return f"{host.python} has no {' and no '.join(missing)}{remedy}"
    other = [f"{name} is {theirs[name]} there and {ours[name]} here" for name in ours if theirs[name] != ours[name]]
    if other:
        return f"{', '.join(other)}{remedy}"
    if answer["package"] != _package_digest():
        return f"atoll {ours['atoll']} there has other files than here; install the same there"
    if not answer["directory"]:
        return f"there is no directory {host.directory}; make it, set `workdir` in the cluster file, or let --sync make it"
    if not fitting:
        what = "is another file there than here" if any(answer["scripts"]) else "is not there"
        return f"{script.name} {what} (in {host.directory}); --sync copies the script's directory"
    if run is not None and not answer["shared"]:
        return (
            f"it does not see the run's directory {run.resolve()}, where ranks read the plan and write checkpoints: put it (--out) on "
            "a file system that all hosts mount at the same path, or train with --mode swarm, which needs none"
        )
    return None


def _unreached(name: str, addresses: Sequence[str]) -> str:
    return (
        f"host {name!r}: it does not reach this machine (tried {', '.join(addresses)}): a firewall or address translation is between; "
        "start `atoll run` on a machine that all hosts reach"
    )


def _package_digest() -> str:
    """Of Atoll's own files, as `_CHECK` takes it."""
    total = hashlib.sha256()
    for folder, folders, files in os.walk(_PACKAGE):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                total.update(hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest().encode())
    return total.hexdigest()


@contextmanager
def _nonce(run: Path) -> Iterator[Path]:
    """A file in the run's directory, which only those see who see the directory."""
    path = run.resolve() / f".shared-{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def copy_directory(host: OverSsh, folder: Path, run: Path, *, rsync: bool = True) -> None:
    """Copies a directory, without what is made from it or about it: environments, caches, repositories, runs. AtollError where it fails.

    By rsync if both sides have it, else as an archive that the host's Python unpacks. Files that are only there are left alone.
    """
    assert host.facts  # an error where it is not reached
    try:
        has_rsync = host.ask(_MAKE, host.directory).strip() == "True"
    except AtollError as error:
        why = str(error).removeprefix(f"host {host.name!r}: ")
        raise AtollError(f"host {host.name!r}: the directory {host.directory} cannot be made there: {why}") from None
    inside = run.resolve().is_relative_to(folder)
    omitted = (*_NOT_COPIED, *([f"/{run.resolve().relative_to(folder).as_posix()}"] if inside else []))
    by_rsync = rsync and has_rsync and shutil.which("rsync") is not None
    code, said = _by_rsync(host, folder, omitted) if by_rsync else _as_archive(host, folder, omitted)
    if code:
        full = "No space left" in said or "quota" in said.lower() or _has_no_room(host, folder)
        raise AtollError(f"host {host.name!r}: {_failed(said, code, folder, host.directory, full)}")


def _has_no_room(host: OverSsh, folder: Path) -> bool:
    """Whether less is free there than the directory has: rsync may end without a word then."""
    try:
        return int(host.ask(_FREE, host.directory)) < sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except (AtollError, OSError, ValueError):
        return False


def _by_rsync(host: OverSsh, folder: Path, omitted: Sequence[str]) -> tuple[int, str]:
    *ssh, address = host.ssh
    there = host.directory.removeprefix("~/") or "."  # relative to the home directory there
    target = f"[{address}]:{there}/" if ":" in address else f"{address}:{there}/"
    command = ["rsync", "-a", "-s", *(f"--exclude={name}" for name in omitted), "-e", shlex.join(ssh), f"{folder}/", target]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return done.returncode, done.stderr


def _as_archive(host: OverSsh, folder: Path, omitted: Sequence[str]) -> tuple[int, str]:
    far = shlex.join(["exec", host.python, "-I", "-S", "-c", _UNPACK, host.directory])
    with subprocess.Popen([*host.ssh, far], stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # it has said why
            with tarfile.open(fileobj=process.stdin, mode="w|") as archive:
                archive.add(folder, ".", filter=lambda member: None if _is_omitted(member.name, omitted) else member)
            process.stdin.close()
        said = process.stderr.read().decode(errors="replace")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    return process.returncode, said


def _is_omitted(name: str, omitted: Sequence[str]) -> bool:
    path = PurePosixPath(name)
    return path.name in omitted or f"/{path.as_posix()}" in omitted


def _failed(said: str, code: int, folder: Path, directory: str, full: bool) -> str:
    if full:
        return f"copying {folder} to {directory}: the disk there is full; make room, or set `workdir` in the cluster file"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "denied" in line.lower()] or lines or [f"exit code {code}"]
    return f"copying {folder} to {directory} failed: {telling[0]}"
