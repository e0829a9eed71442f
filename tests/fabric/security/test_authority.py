"""The authority by itself: what it keeps and for whom, what survives, and that several processes may use it."""

import multiprocessing
import stat
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.errors import FabricError, RefusedError
from atoll.fabric.security import Authority, Credentials
from atoll.fabric.security.certificates import Revocations, SignedRevocations, make_request, read_revocations, sign_revocations
from atoll.fabric.security.token import Token


def request() -> bytes:
    return make_request(Ed25519PrivateKey.generate())


def enrolled(authority: Authority, token: str, name: str) -> str:
    parsed = Token.parse(token)
    return authority.enrol(parsed.id, parsed.secret, name, request()).identity.uri


def test_secrets_are_for_their_owner_only_and_tokens_are_kept_as_digests(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    token = Token.parse(authority.issue_token())
    assert stat.S_IMODE(authority.directory.stat().st_mode) == 0o700
    files = list(authority.directory.iterdir())
    assert {"authority.key", "authority.crt", "ledger.json"} <= {path.name for path in files}
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert token.secret not in path.read_bytes()
        assert token.secret.hex().encode() not in path.read_bytes()
        assert token.text.encode() not in path.read_bytes()


def test_a_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    (authority.directory / "authority.key").chmod(0o640)
    with pytest.raises(FabricError, match=r"authority.key: others than its owner may read it"):
        Authority.open(tmp_path)


def test_an_authority_outlives_its_process(tmp_path: Path) -> None:
    first = Authority.create(tmp_path)
    token = first.issue_token("feeder", uses=2)
    enrolled(first, token, "zero")
    enrolled(first, first.issue_token("feeder"), "one")
    first.revoke("one", "gone")
    again = Authority.open(tmp_path)
    assert again.run == first.run
    assert enrolled(again, token, "two") == f"atoll://{first.run}/feeder/two"
    with pytest.raises(RefusedError, match="used up"):
        enrolled(again, token, "three")
    assert [entry.name for entry in again.revocations().entries] == ["one"]
    assert {member.name for member in again.members()} == {"zero", "two"}
    with pytest.raises(FabricError, match="there is an authority already"):
        Authority.create(tmp_path)
    with pytest.raises(FabricError, match=r"authority.key: cannot read it: No such file"):
        Authority.open(tmp_path / "nowhere")


def _enrol_many(directory: Path, token: str, prefix: str, results: "multiprocessing.Queue[int]") -> None:
    authority, count = Authority.open(directory), 0
    for number in range(12):
        try:
            enrolled(authority, token, f"{prefix}{number}")
            count += 1
        except RefusedError:
            pass
    results.put(count)


def test_processes_at_once_use_a_token_no_more_often_than_it_is_good_for(tmp_path: Path) -> None:
    token = Authority.create(tmp_path).issue_token(uses=10)
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    processes = [context.Process(target=_enrol_many, args=(tmp_path, token, prefix, results)) for prefix in "ab"]
    for process in processes:
        process.start()
    assert sum(results.get(timeout=60) for _ in processes) == 10
    for process in processes:
        process.join()


def test_what_is_refused_uses_nothing_up(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    token = Token.parse(authority.issue_token())
    for name, data in (("bad name", request()), ("fine", b"no request"), ("fine", request()[:-1] + b"x"), ("fine", bytes(5000))):
        with pytest.raises(RefusedError):
            authority.enrol(token.id, token.secret, name, data)
    assert enrolled(authority, token.text, "fine").endswith("/worker/fine")


def test_tokens_for_nobody_or_for_coordinators_are_not_issued(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    for options in ({"role": "king"}, {"role": "coordinator"}, {"uses": 0}, {"lifetime_seconds": 0}):
        with pytest.raises(RefusedError):
            authority.issue_token(**options)  # type: ignore[arg-type]


def test_only_members_renew_and_revoked_ones_do_not(tmp_path: Path) -> None:
    now = [1e9]
    authority = Authority.create(tmp_path, clock=lambda: now[0])
    enrolled(authority, authority.issue_token(), "rome")
    assert authority.renew("rome", "worker", request()).identity.name == "rome"
    with pytest.raises(RefusedError, match="has no certificate of this run that is valid"):
        authority.renew("rome", "coordinator", request())
    assert authority.revoke("rome", "enough") == 2, "the first and the renewed one"
    with pytest.raises(RefusedError, match="has no certificate of this run that is valid"):
        authority.renew("rome", "worker", request())
    enrolled(authority, authority.issue_token(), "rome")
    now[0] += 3601
    with pytest.raises(RefusedError, match="has no certificate of this run that is valid"):
        authority.renew("rome", "worker", request())


def test_who_was_shut_out_does_not_come_back_with_the_same_token(tmp_path: Path) -> None:
    authority = Authority.create(str(tmp_path))
    shared, other = authority.issue_token(uses=5), authority.issue_token(uses=5)
    enrolled(authority, shared, "rome")
    authority.renew("rome", "worker", request())
    authority.revoke("rome", "it sent wrong gradients")
    for name in ("rome", "oslo"):
        with pytest.raises(RefusedError, match="the token was cancelled: a member that enrolled with it was shut out"):
            enrolled(authority, shared, name)
    enrolled(authority, other, "oslo")


def test_a_ledger_forgets_what_ended_long_ago(tmp_path: Path) -> None:
    now = [1e9]
    authority = Authority.create(tmp_path, clock=lambda: now[0])
    for number in range(5):
        enrolled(authority, authority.issue_token(), f"m{number}")
    now[0] += 30 * 86400
    authority.issue_token()
    ledger = authority._ledger.read()
    assert len(ledger.tokens) == 1
    assert not ledger.issued


@given(st.binary(min_size=56, max_size=56), st.integers(0, 87), st.characters(min_codepoint=33, max_codepoint=126))
@example(b"\xfb\xef\xbe" * 18 + b"\xfb\xef", 25, "+")
@example(b"\xff" * 56, 25, "/")
def test_a_token_survives_its_text_and_a_slip_is_noticed(data: bytes, place: int, letter: str) -> None:
    token = Token(data[:8].hex(), data[8:24], data[24:])
    assert Token.parse(f" {token.text}\n") == token
    assert token.secret.hex() not in repr(token)
    slipped = token.text[:place] + letter + token.text[place + 1 :]
    if slipped != token.text:
        with pytest.raises(RefusedError, match="this is no join token, or not all of one"):
            Token.parse(slipped)


def test_revocations_are_the_authoritys_word_only(tmp_path: Path) -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    signed = sign_revocations(Revocations(3), key)
    assert read_revocations(signed, public).number == 3
    changed = SignedRevocations(msgspec.msgpack.encode(Revocations(4)), signed.signature)
    for wrong in (changed, sign_revocations(Revocations(4), other), SignedRevocations(b"", b"")):
        with pytest.raises(RefusedError, match="that the run's authority did not sign"):
            read_revocations(wrong, public)


def test_credentials_are_kept_in_files_of_their_owner(tmp_path: Path) -> None:
    credentials = Authority.create(tmp_path / "run").credentials("rome", "worker")
    credentials.save(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys" / "member.key").stat().st_mode) == 0o600
    loaded = Credentials.load(tmp_path / "keys")
    assert loaded.identity == credentials.identity
    assert loaded.client_context.minimum_version == loaded.client_context.maximum_version
    with pytest.raises(RefusedError, match="the certificate is for another key"):
        Credentials(Ed25519PrivateKey.generate(), credentials.certificate_der, credentials.authority_der)
    (tmp_path / "keys" / "member.crt").write_text("nonsense")
    with pytest.raises(FabricError, match=r"member.crt: no certificate"):
        Credentials.load(tmp_path / "keys")
