"""What runs on the inner side of a lab: `hold`, `host`, `enter`, and `guard` where there are no namespaces. A program of its own, standard
library only, so that it starts in milliseconds: `python -I -S inside.py hold|host|enter|guard …`. Not for people.

A lab has no name anywhere outside its own processes: namespaces, interfaces, mounts and files belong to the processes below, and the kernel
removes all of it with the last of them. Each one ends when its standard input does, that is when the lab's process ends, however it ends;
and where the first process of a PID namespace ends, the kernel kills the rest.
"""

import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
from types import FrameType

_NEW_MOUNTS, _NEW_NAMES, _NEW_NET, _NEW_PIDS, _NEW_USERS = 0x00020000, 0x04000000, 0x40000000, 0x20000000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_NETWORKS = "/run/netns"  # where `ip netns` keeps names: here a file system that only the lab sees
_FILES = f"{_NETWORKS}/lab"
_CANNOT_START = 127
_LOOK_SECONDS = 0.1


def main(arguments: list[str]) -> None:
    """One of the four."""
    {"hold": _hold, "host": _host, "enter": _enter, "guard": _guard}[arguments[0]](arguments[1:])


def _hold(arguments: list[str]) -> None:
    """Makes the lab's own network and mount namespaces and keeps them."""
    if os.geteuid():
        _become_root_of_a_new_user_namespace()
    _unshare(_NEW_MOUNTS | _NEW_NET)
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _make_place_for_networks()
    _mount("atoll", _NETWORKS, "tmpfs")
    os.mkdir(_FILES)
    _say(str(os.getpid()))
    _wait_for_the_end()


def _host(arguments: list[str]) -> None:
    """Becomes a host: its network, name, tables of names and processes. The argument is JSON: see `world.HostSetup`."""
    setup = json.loads(arguments[0])
    _join(setup["holder"], ("user", "mnt"))
    with open(f"{_NETWORKS}/{setup['network']}") as network:
        _set_namespace(network.fileno())
    _unshare(_NEW_MOUNTS | _NEW_NAMES | _NEW_PIDS)
    told, tell = os.pipe()
    first = os.fork()
    if first:
        _say(str(first))
        os.close(tell)
        os.waitpid(first, 0)
        return
    os.close(tell)
    os.read(told, 1)  # its number is said before it says anything itself
    _call("prctl", _DIE_WITH_PARENT, signal.SIGKILL)
    socket.sethostname(setup["name"])
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)  # `ip netns` shares what it mounts
    for path, text in setup["files"].items():
        if os.path.exists(path):
            own = f"{_FILES}/{setup['name']}{path.replace('/', '-')}"
            _write(own, text)
            _mount(own, path, None, _BIND)
    _mount("proc", "/proc", "proc")
    for name, value in setup["settings"].items():
        if os.path.exists(f"/proc/sys/{name}"):
            _write(f"/proc/sys/{name}", value)
    _say("ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are this process's to bury; the kernel does it
    _wait_for_the_end()


def _enter(arguments: list[str]) -> None:
    """Runs a command among the processes of `pid`, in the same directory, and ends as it ends."""
    pid, wanted, *command = arguments
    here = os.getcwd()
    _join(int(pid), wanted.split(","))
    child = _begin(command, here)  # a PID namespace is entered by children
    _pass_signals_on(child)
    _, status = os.waitpid(child, 0)
    _end_alike(os.waitstatus_to_exitcode(status))


def _guard(arguments: list[str]) -> None:
    """Runs a command, and kills it and its session when the file given by its number ends."""
    watched, *command = arguments
    child = _begin(command, os.getcwd())
    _pass_signals_on(child)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if select.select([int(watched)], [], [], _LOOK_SECONDS)[0]:
            os.killpg(os.getpgid(0), signal.SIGKILL)
    _end_alike(os.waitstatus_to_exitcode(ended[1]))


def _begin(command: list[str], directory: str) -> int:
    child = os.fork()
    if child:
        return child
    _call("prctl", _DIE_WITH_PARENT, signal.SIGKILL)
    try:
        os.chdir(directory)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"atoll lab: cannot start {command[0]}: {(error.strerror or str(error)).lower()}", file=sys.stderr, flush=True)
    os._exit(_CANNOT_START)


def _pass_signals_on(child: int) -> None:
    """Those of a terminal reach the command by themselves, unless it has a session of its own."""

    def pass_on(number: int, frame: "FrameType | None") -> None:
        os.kill(child, number)

    own_session = os.getsid(0) == os.getpid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, pass_on if own_session else signal.SIG_IGN)


def _end_alike(code: int) -> None:
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _become_root_of_a_new_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    _unshare(_NEW_USERS)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {user} 1")
    _write("/proc/self/gid_map", f"0 {group} 1")


def _make_place_for_networks() -> None:
    """`ip netns` makes this directory, too; whoever may not gets a /run of the lab's own."""
    try:
        os.makedirs(_NETWORKS, exist_ok=True)
    except OSError:
        _mount("atoll", "/run", "tmpfs")
        os.mkdir(_NETWORKS)


def _join(pid: int, names: "list[str] | tuple[str, ...]") -> None:
    """Joins namespaces of a process; those that are this process's already are left out, as the kernel refuses them."""
    files = []
    for name in names:
        theirs, own = os.stat(f"/proc/{pid}/ns/{name}"), os.stat(f"/proc/self/ns/{name}")
        if theirs.st_ino != own.st_ino:
            files.append(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY))
    for file in files:
        _set_namespace(file)
        os.close(file)


def _unshare(flags: int) -> None:
    _call("unshare", flags)


def _set_namespace(file: int) -> None:
    _call("setns", file, 0)


def _mount(source: str, target: str, kind: "str | None", flags: int = 0) -> None:
    _call("mount", source.encode(), target.encode(), kind.encode() if kind else None, flags, None)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        what = "not permitted" if number == errno.EPERM else os.strerror(number).lower()
        sys.exit(f"{name}: {what}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def _wait_for_the_end() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
