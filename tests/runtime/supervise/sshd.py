"""A real sshd with keys of its own, and the ssh configuration that reaches it. Nothing of the user's own is read or written."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["SSHD", "Keys", "local_sshd", "why_no_sshd"]

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def why_no_sshd() -> str | None:
    """Why these tests cannot run; None: they can."""
    if not os.access(SSHD, os.X_OK) or shutil.which("ssh") is None:
        return "no sshd: install openssh-server and openssh-client"
    return None


class Keys:
    """Host keys, a user's key, and files for ssh and sshd, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make("user")
        (folder / "authorized_keys").write_text((folder / "user.pub").read_text())
        self.known: list[str] = []
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # sshd wants it, empty

    def _make(self, name: str) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True)

    def server(self, name: str, *, address: str, port: int, known_as: str) -> list[str]:
        """The command of a server of this name, with a host key of its own that clients know."""
        self._make(f"host-{name}")
        self.known.append(f"{known_as} {(self.folder / f'host-{name}.pub').read_text()}")
        (self.folder / "known_hosts").write_text("".join(self.known))
        config = self.folder / f"sshd-{name}"
        imports = f"SetEnv PYTHONPATH={os.environ['PYTHONPATH']}\n" if os.environ.get("PYTHONPATH") else ""  # the Atoll under test
        config.write_text(
            f"Port {port}\nListenAddress {address}\nHostKey {self.folder}/host-{name}\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"PermitRootLogin prohibit-password\nPrintMotd no\nMaxStartups 100\n{imports}"
        )
        return [SSHD, "-D", "-e", "-f", str(config)]

    def client(self, hosts: Mapping[str, str] | None = None, *, key: str = "user", known: str = "known_hosts") -> str:
        """The command for ATOLL_SSH; `hosts` are lines of configuration by alias."""
        config = self.folder / f"config-{key}-{known}"
        entries = "".join(f"Host {alias}\n{lines}" for alias, lines in (hosts or {}).items())
        config.write_text(
            f"{entries}Host *\nIdentityFile {self.folder}/{key}\nIdentitiesOnly yes\nStrictHostKeyChecking yes\n"
            f"UserKnownHostsFile {self.folder}/{known}\nGlobalKnownHostsFile /dev/null\n"
        )
        return f"ssh -F {config}"


@contextmanager
def local_sshd(folder: Path) -> Iterator[tuple[Keys, int]]:
    """A server on the loopback interface, at a port of its own."""
    keys = Keys(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = keys.server("far", address="127.0.0.1", port=port, known_as=f"[127.0.0.1]:{port}")
    with (folder / "sshd.log").open("w") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            while server.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.02)
            assert server.poll() is None, (folder / "sshd.log").read_text()
            yield keys, port
        finally:
            server.terminate()
