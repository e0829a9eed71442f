"""The audit log: whatever is done to it afterwards is noticed, and named; it is gone on with where a process ended."""

import hashlib
import json
from pathlib import Path

import pytest

from atoll.cli.main import run
from atoll.errors import AtollError
from atoll.privacy.audit_log import AuditLog, check_log


def write_log(directory: Path, count: int = 6, name: str = "gateway") -> None:
    log = AuditLog(directory, name, clock=lambda: 1_800_000_000.0)
    for number in range(count):
        add(log, f"update {number}")
    log.close()


def add(log: AuditLog, name: str, **changed: object) -> None:
    fields = {"direction": "out", "site": "rome", "peer": "oslo-0", "peer_site": "oslo", "kind": "updates", "name": name, "codec": "int4"}
    log.append(**{**fields, "tensors": (("int8", (1000,)),), "bytes": 1100, **changed})


def lines_of(directory: Path) -> list[bytes]:
    return (directory / "gateway.jsonl").read_bytes().splitlines(keepends=True)


def rewrite(directory: Path, lines: list[bytes]) -> None:
    (directory / "gateway.jsonl").write_bytes(b"".join(lines))


def rehashed(line: bytes, before: bytes) -> bytes:
    """A record with the hash it would have, computed here as the format is documented."""
    rest = line.rstrip(b"\n").split(b",", 1)[1]
    last = json.loads(before)["hash"]
    found = hashlib.sha256(bytes.fromhex(last) + hashlib.sha256(rest).digest()).hexdigest()
    return b'{"hash":"%s",%s\n' % (found.encode(), rest)


def problems(directory: Path) -> tuple[str, ...]:
    return check_log(directory, "gateway").problems


def test_a_log_that_nobody_touched_is_whole_and_says_what_crossed(tmp_path: Path) -> None:
    write_log(tmp_path)
    found = check_log(tmp_path, "gateway")
    assert not found.problems
    assert not found.notes
    assert [record.number for record in found.records] == [1, 2, 3, 4, 5, 6]
    first = found.records[0]
    assert (first.peer, first.kind, first.name, first.codec, first.bytes) == ("oslo-0", "updates", "update 0", "int4", 1100)
    assert first.tensors == (("int8", (1000,)),)
    assert (tmp_path / "gateway.jsonl").stat().st_mode & 0o077 == 0


def test_every_byte_counts(tmp_path: Path) -> None:
    """Any byte of any line changed, the line's hash included: it is noticed, at that record or at the one after it."""
    write_log(tmp_path, 3)
    whole = (tmp_path / "gateway.jsonl").read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == 10]
    for place in range(0, len(whole), 7):
        (tmp_path / "gateway.jsonl").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        number = sum(end < place for end in ends) + 1
        assert any(f"record {number}" in text or f"line {number}" in text for text in problems(tmp_path)), place


def test_a_changed_record_is_named_also_with_a_hash_that_fits_it(tmp_path: Path) -> None:
    write_log(tmp_path)
    lines = lines_of(tmp_path)
    changed = lines[2].replace(b'"bytes":1100', b'"bytes":11')
    rewrite(tmp_path, [*lines[:2], changed, *lines[3:]])
    assert problems(tmp_path) == ("record 3 was changed, or record 2 and its hash were",)
    rewrite(tmp_path, [*lines[:2], rehashed(changed, lines[1]), *lines[3:]])
    assert problems(tmp_path) == ("record 4 was changed, or record 3 and its hash were",)


def test_a_history_written_anew_to_the_end_is_not_the_one_its_head_knows(tmp_path: Path) -> None:
    write_log(tmp_path)
    lines = lines_of(tmp_path)
    lines[2] = lines[2].replace(b'"bytes":1100', b'"bytes":11')
    for number in range(2, 6):
        lines[number] = rehashed(lines[number], lines[number - 1])
    rewrite(tmp_path, lines)
    assert problems(tmp_path) == ("record 6 is not the one its head knows",)


def test_removed_reordered_repeated_and_foreign_records_are_named(tmp_path: Path) -> None:
    write_log(tmp_path)
    lines = lines_of(tmp_path)
    rewrite(tmp_path, [*lines[:2], *lines[3:]])
    assert problems(tmp_path) == ("record 3 is missing",)
    rewrite(tmp_path, [*lines[:1], *lines[4:]])
    assert problems(tmp_path) == ("records 2 … 4 are missing",)
    rewrite(tmp_path, lines[1:])
    assert problems(tmp_path) == ("record 1 is missing",)
    rewrite(tmp_path, [lines[0], lines[2], lines[1], *lines[3:]])
    assert problems(tmp_path) == ("line 3: record 2 stands after record 3: it was moved",)
    rewrite(tmp_path, [*lines[:3], lines[1], *lines[3:]])
    assert problems(tmp_path) == ("line 4: record 2 is there twice",)
    rewrite(tmp_path, [*lines[:3], b"once upon a time\n", *lines[3:]])
    assert problems(tmp_path) == ("line 4 is no record",)


@pytest.mark.parametrize("left", [0, 3, 5])
def test_what_was_cut_off_at_the_end_is_missed(tmp_path: Path, left: int) -> None:
    write_log(tmp_path)
    rewrite(tmp_path, lines_of(tmp_path)[:left])
    missing = "record 6 is" if left == 5 else f"records {left + 1} … 6 are"
    assert problems(tmp_path) == (f"{missing} missing at the end: the head knows 6",)


def test_heads_that_are_gone_changed_old_or_another_logs(tmp_path: Path) -> None:
    write_log(tmp_path, 3)
    head = tmp_path / "gateway.head.json"
    old = head.read_bytes()
    assert json.loads(old)["records"] == 3
    log = AuditLog(tmp_path, "gateway")
    for number in range(3):
        add(log, f"more {number}")
    log.close()
    head.write_bytes(old)
    assert problems(tmp_path) == ("records 4 … 6 are not known to the head, which is an older one",)
    head.write_bytes(old.replace(b"              3", b"              2"))
    assert problems(tmp_path) == ("its head gateway.head.json is not what was written: its checksum differs",)
    head.unlink()
    assert "its head gateway.head.json is missing" in problems(tmp_path)[0]
    (tmp_path / "gateway.jsonl").unlink()
    head.write_bytes(old)
    assert problems(tmp_path)[0] == "the log is gone; only its head is left"
    write_log(tmp_path / "other", name="another")
    (tmp_path / "gateway.jsonl").write_bytes((tmp_path / "other" / "another.jsonl").read_bytes())
    assert problems(tmp_path)[0] == "record 1 was changed, or it is another log's"


def test_a_process_that_died_while_writing_leaves_a_log_that_is_gone_on_with(tmp_path: Path) -> None:
    write_log(tmp_path, 3)
    head_of_three = (tmp_path / "gateway.head.json").read_bytes()
    log = AuditLog(tmp_path, "gateway")
    add(log, "the fourth")
    log.close()
    (tmp_path / "gateway.head.json").write_bytes(head_of_three)  # it ended between the record and the head
    with (tmp_path / "gateway.jsonl").open("ab") as file:
        file.write(b'{"hash":"00')  # and another one in the middle of a line
    found = check_log(tmp_path, "gateway")
    assert not found.problems
    assert len(found.notes) == 2
    log = AuditLog(tmp_path, "gateway")
    add(log, "the fifth")
    log.close()
    found = check_log(tmp_path, "gateway")
    assert not found.problems
    assert not found.notes
    assert [record.name for record in found.records] == ["update 0", "update 1", "update 2", "the fourth", "the fifth"]


def test_nothing_is_added_to_a_log_that_is_not_whole_and_bad_names_are_refused(tmp_path: Path) -> None:
    write_log(tmp_path)
    rewrite(tmp_path, lines_of(tmp_path)[:2])
    with pytest.raises(AtollError, match=r"is not whole, so nothing is added to it: records 3 … 6 are missing at the end"):
        AuditLog(tmp_path, "gateway")
    with pytest.raises(AtollError, match=r"cannot be named '\.\./x'"):
        AuditLog(tmp_path, "../x")
    (tmp_path / "file").write_text("")
    with pytest.raises(AtollError, match="cannot write the audit log"):
        AuditLog(tmp_path / "file", "gateway")


def test_the_command_verifies_and_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "audit"
    write_log(directory)
    log = AuditLog(directory, "other")
    add(log, "logits of step 3", kind="logits", codec="none", refused="site 'rome' may send only updates")
    log.close()
    assert run(["audit", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Log gateway  whole, 6 records, head " in text
    assert "to oslo-0 at oslo" in text
    assert "6.6 kB" in text
    assert "Refused" in text
    assert run(["audit", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["whole"] is True
    assert [(one["kind"], one["messages"], one["bytes"]) for one in found["crossed"]] == [("updates", 6, 6600)]
    assert found["refused"][0]["refused"] == "site 'rome' may send only updates"
    noted = found["logs"][0]["head"]
    assert run(["audit", str(tmp_path), "--head", noted]) == 0
    assert run(["audit", str(tmp_path), "--head", "0" * 64]) == 1
    assert "no log has a record with the hash 000" in capsys.readouterr().out

    lines = lines_of(directory)
    rewrite(directory, lines[:4])
    assert run(["audit", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["whole"] is False
    assert found["logs"][0]["problems"] == ["records 5 … 6 are missing at the end: the head knows 6"]
    assert run(["audit", str(tmp_path)]) == 1
    assert "not whole" in capsys.readouterr().out


def test_a_run_without_logs_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", str(tmp_path)]) == 2
    assert "has no audit logs" in capsys.readouterr().err
    assert run(["audit", str(tmp_path / "no")]) == 2
    assert "there is no such directory" in capsys.readouterr().err
