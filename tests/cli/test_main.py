"""The command as a user meets it: exit codes, one sentence, no traceback."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.cli.main import run

TINY = """
name = "tiny"
[[site]]
name = "oslo"
  [[site.host]]
  devices = [{ kind = "A100-80GB", count = 2 }]
"""
PLAN = """plan v1 graph=bert-large cluster=tiny batch=8 micro_batch=4
stage 0: layers 0-25: 2x(oslo-0/[0-1])=4
"""
COMMAND = [sys.executable, "-c", "from atoll.cli import main; main()"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    Path("good.plan").write_text(PLAN)
    Path("wrong.plan").write_text(PLAN.replace(")=4", ")=3"))
    Path("other.plan").write_text(PLAN.replace("2x(oslo-0/[0-1])=4", "oslo-0/0=3 oslo-0/1=5"))
    Path("broken.toml").write_text("name = \n")
    Path("broken.json").write_text('{"graph": ')
    Path("script.py").write_text("import atoll\nraise RuntimeError('boom')\n")
    return tmp_path


BAD_INPUT = {
    "plan bert-large -c none.toml": "error: none.toml: there is no such file",
    "plan bert-large -c broken.toml": "error: broken.toml: line 1",
    "plan bert-larg -c tiny.toml": "did you mean 'bert-large'",
    "plan none.py -c tiny.toml": "error: none.py: there is no such file",
    "plan ./script.py -c tiny.toml": "RuntimeError: boom",
    "plan script.py -c tiny.toml": "script.py:2",
    "plan bert-large -c tiny.toml --check none.json": "error: none.json: cannot read the plan",
    "plan bert-large -c tiny.toml --check broken.json": "error: broken.json: this is not JSON",
    "plan bert-large -c tiny.toml --check wrong.plan": "error: wrong.plan: stage 0: its replicas take 6 samples, but the batch has 8",
    "plan bert-large -c tiny.toml --calibration none.json": "error: none.json: cannot read",
    "plan bert-large -c tiny.toml --mode lockstap": "lockstep",
    "plan bert-large -c tiny.toml --mode tables": "'tables' is not one of",
    "run . -c tiny.toml": "error: .: is a directory; `atoll run` needs a training script",
    "run script.py -c tiny.toml --rate 3": "The script's own arguments come last, after `--`",
    "run script.py --alone --resume script.py": "error: script.py: is a file, not a run's directory",
    "run script.py -c tiny.toml --codec zip": "Invalid value for '--codec': 'zip' is not one of",
    "run script.py -c tiny.toml --mode swarm --listen here": "error: --listen 'here' is no address; write it like 'host:port'",
    "run script.py -c tiny.toml --listen 127.0.0.1:7000": "error: `--listen` needs `--mode swarm`: only a swarm has others join",
    "plan nonsense -c tiny.toml": "`atoll presets` lists them",
    "plan bert-large -c tiny.toml --top 0": "--top",
    "plan bert-large -c tiny.toml --batch-size -3": "--batch-size",
    "plan bert-large -c tiny.toml -o nowhere/p.json": "error: -o nowhere/p.json: there is no directory",
    "plan bert-large -c tiny.toml -o .": "error: -o .: is a directory; give a file",
    "plan bert-large": "--cluster",
    "plan bert-large --clustr tiny.toml": "--cluster",
    "pla bert-large": "plan",
    "diff good.plan wrong.plan": "error: wrong.plan: stage 0: its replicas take 6 samples, but the batch has 8",
    "diff wrong.plan good.plan --json": "error: wrong.plan: stage 0: its replicas take 6 samples, but the batch has 8",
    "diff good.plan none.plan": "error: none.plan: cannot read the plan",
}


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_is_a_sentence_on_stderr_and_exit_code_2(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert BAD_INPUT[command] in captured.err
    assert "Traceback" not in captured.err


def test_the_process_itself_exits_with_2_and_without_a_traceback(folder: Path) -> None:
    done = subprocess.run([*COMMAND, "plan", "bert-large", "--cluster", "none.toml"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: none.toml: there is no such file\n"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("atoll ")
    assert run(["plan", "--help"]) == 0
    assert "--cluster" in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    process = subprocess.Popen([*COMMAND, "diff", "good.plan", "other.plan"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.wait()
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(("redirection", "words"), [(">&-", "standard output is closed"), (">/dev/full", "No space left on device")])
@pytest.mark.parametrize("command", ["diff good.plan other.plan", "presets --json", "--help"])
def test_output_that_cannot_be_printed_is_exit_code_1_and_a_sentence(folder: Path, redirection: str, words: str, command: str) -> None:
    shell = f"{shlex.join(COMMAND)} {command} {redirection}"
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nowhere_to_complain_is_no_traceback_either(folder: Path) -> None:
    assert subprocess.run(["sh", "-c", f"{shlex.join(COMMAND)} presets >&- 2>&-"], check=False).returncode == 1


def test_ctrl_c_is_quiet(folder: Path) -> None:
    Path("slow.py").write_text("open('started', 'w').close()\nimport time\ntime.sleep(60)\n")
    with subprocess.Popen([*COMMAND, "plan", "slow.py", "-c", "tiny.toml"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not Path("started").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


def test_a_fault_of_our_own_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(path: Path) -> None:
        raise KeyError("inside")

    monkeypatch.setattr("atoll.cli.diff.load_plan", broken)
    assert run(["diff", "good.plan", "good.plan"]) == 1
    assert "a fault in Atoll" in capsys.readouterr().err
    assert run(["--debug", "diff", "good.plan", "good.plan"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_diff_says_what_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "good.plan", "other.plan"]) == 0
    assert capsys.readouterr().out == "stage 0: samples 2×(4) → 3 5\n"
    assert run(["diff", "good.plan", "good.plan", "--json"]) == 0
    assert '"changes": []' in capsys.readouterr().out
