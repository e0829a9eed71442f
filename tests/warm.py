"""Commands as processes of their own that need not load PyTorch: they are forked off a process that has loaded it, and nothing of Atoll.

`run_warm` is `subprocess.run` with captured output for `[sys.executable, "-c", CODE, …]` and `[sys.executable, SCRIPT, …]`;
`run_warm_beside` runs several at once. What is said of starting itself (what is loaded, how long it takes, signals) is tested with
`subprocess`.
"""

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).parents[1]
_once = Lock()
_LOADED = (
    *("cryptography.x509", "msgspec", "rich.console", "rich.table", "safetensors.torch", "scipy.optimize"),
    *("torch.distributed.fsdp", "torch.distributed.tensor"),
)


def run_warm(
    command: Sequence[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command of this interpreter to its end."""
    interpreter, *arguments = map(str, command)
    assert interpreter == sys.executable
    request = {"arguments": arguments, "cwd": str(cwd or Path.cwd()), "environ": dict(os.environ if env is None else env)}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, socket.socket(socket.AF_UNIX) as connection:
        with _once:
            connection.connect(_server())
        body = json.dumps(request).encode()
        socket.send_fds(connection, [len(body).to_bytes(8, "big")], [out.fileno(), errors.fileno()])
        connection.sendall(body)
        answer = connection.makefile("rb").readline()
        assert answer, "the process that forks commands has died"
        said = [_text(file) for file in (out, errors)]
    return subprocess.CompletedProcess(list(map(str, command)), int(answer), *said)


def run_warm_beside(
    commands: Sequence[Sequence[str | Path]], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> "list[subprocess.CompletedProcess[str]]":
    """Run commands at the same time, all to their ends; each must succeed."""
    with ThreadPoolExecutor(len(commands)) as together:
        ended = list(together.map(lambda command: run_warm(command, cwd, env), commands))
    for process in ended:
        assert process.returncode == 0, f"{process.args}: {process.stdout[-2000:]}\n{process.stderr[-6000:]}"
    return ended


def _text(file: "tempfile._TemporaryFileWrapper[bytes] | io.BufferedRandom") -> str:
    file.seek(0)
    return file.read().decode()


@cache
def _server() -> str:
    """Where the process that forks listens; it ends with this one."""
    folder = tempfile.TemporaryDirectory()
    path = str(Path(folder.name) / "socket")
    process = subprocess.Popen([sys.executable, "-m", "tests.warm", path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None

    def end() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    assert process.stdout.readline() == b"ready\n"
    return path


def _load() -> None:
    """What commands load. PyTorch and Typer load much of what they need when they first export a model and read an option."""
    for name in _LOADED:
        importlib.import_module(name)
    import torch.export
    import typer
    from torch import nn

    command = typer.Typer(add_completion=False)

    @command.command()
    def nothing(number: int = 0) -> None: ...

    command(["--number", "1"], standalone_mode=False)
    sys.excepthook = sys.__excepthook__  # which Typer has replaced, in this process that is no command

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm, self.wide = nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 24)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.words(ids) + self.words(torch.arange(ids.shape[1]))
            query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.wide(self.norm(x)).chunk(3, dim=-1))
            x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
            x = torch.tanh(nn.functional.gelu(nn.functional.dropout(x))) ** 2
            return nn.functional.cross_entropy(x.flatten(0, 1), ids.flatten())

    with torch.random.fork_rng(devices=[]):
        torch.export.export(Small(), (torch.zeros(4, 4, dtype=torch.long),), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)


def _serve(path: str) -> None:
    _load()
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:  # which closes when who asks ends, however that may be
            connection, _ = listening.accept()
            if os.fork() == 0:  # one that waits for the command and says how it ended
                listening.close()
                os._exit(_attend(connection))
            connection.close()
            while _reap():
                pass


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _attend(connection: socket.socket) -> int:
    head, files, _, _ = socket.recv_fds(connection, 8, 2)
    with connection, connection.makefile("rb") as reading:
        request = json.loads(reading.read(int.from_bytes(head, "big")))
        child = os.fork()
        if child == 0:
            connection.detach()
            _become(request, files)
        _, status = os.waitpid(child, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return 0


def _become(request: dict[str, object], files: list[int]) -> None:
    """This process is the command now."""
    arguments, environ = request["arguments"], request["environ"]
    assert isinstance(arguments, list)
    assert isinstance(environ, dict)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, *files)):
        os.dup2(file, number)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(str(request["cwd"]))
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    sys.stdout.reconfigure(errors="strict")  # type: ignore[attr-defined]
    code = arguments[1] if arguments[0] == "-c" else None
    sys.argv = ["-c", *arguments[2:]] if code is not None else arguments
    first = "" if code is not None else str(Path(arguments[0]).resolve().parent)
    given = [place for place in environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path = [first, *given, *sys.path[1:]]  # the first was the project's own directory
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    status = 1
    try:
        if code is None:
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as ended:  # a hook may say how the process ends
            status = ended.code if isinstance(ended.code, int) else 1
    finally:
        import atexit as registered
        import threading

        threading._shutdown()  # type: ignore[attr-defined]
        registered._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1])
