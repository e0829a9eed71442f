"""States from several donors: divided by speed, verified, resumed, never wrong."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import CollectiveError, FabricError
from atoll.events import DonorRefused, StateFetched
from atoll.fabric.collective import FilePieces, MemoryPieces, PieceStore, State, StateManifest, fetch_state
from atoll.fabric.collective.download import WorkPool
from atoll.fabric.collective.state import piece_digest
from tests.fabric.collective.peers import Party, party

PIECE = 1 << 14


def some_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(300, 100, generator=generator),
        "half": torch.randn(77, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(12),
        "empty": torch.empty(0, 3),
        "mask": torch.rand(1001, generator=generator) > 0.5,
        "transposed": torch.randn(50, 60, generator=generator).T,
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def offer(peers: Party, *names: str, tensors: dict[str, torch.Tensor] | None = None) -> State:
    state = State("step 12", tensors or some_state(), PIECE)
    for name in names:
        peers.donors[name].offer(state)
    return state


def fetch(peers: Party, donors: str, store: PieceStore, digest: str | None = None) -> dict[str, torch.Tensor]:
    remotes = {name: peers.fabrics["a"].peer(name) for name in donors}
    return peers.fabrics["a"].run(fetch_state("step 12", remotes, store, digest=digest, observer=peers.events["a"].append))


def events(peers: Party, kind: type[DonorRefused] | type[StateFetched]) -> list[DonorRefused | StateFetched]:
    return [event for event in peers.events["a"] if isinstance(event, kind)]


@given(st.lists(st.integers(0, 300), max_size=4), st.integers(20, 200))
def test_pieces_make_the_state(sizes: list[int], piece_bytes: int) -> None:
    tensors = {str(i): torch.arange(size, dtype=torch.int16) for i, size in enumerate(sizes)}
    state = State("s", tensors, piece_bytes)
    store = MemoryPieces()
    assert store.begin(state.manifest) == set()
    for index in range(len(state.manifest.digests)):
        parts = state.piece(index)
        assert piece_digest(parts) == state.manifest.digests[index]
        store.write(index, parts)
    assert same(store.tensors(), tensors)
    with pytest.raises(FabricError, match="no piece"):
        state.piece(len(state.manifest.digests))


def test_manifests_that_cannot_be_are_refused() -> None:
    manifest = State("s", some_state(), PIECE).manifest
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=StateManifest) == manifest
    for change in ({"size_bytes": 10}, {"digests": manifest.digests[1:]}, {"piece_bytes": 0}, {"tensors": manifest.tensors[::-1]}):
        with pytest.raises(FabricError, match="state 's'"):
            msgspec.structs.replace(manifest, **change)


@pytest.mark.parametrize("tcp", [False, True])
def test_a_state_comes_from_all_donors(tcp: bool) -> None:
    with party(tcp=tcp) as peers:
        offer(peers, "b", "c", "d")
        assert same(fetch(peers, "bcd", MemoryPieces()), some_state())
        (told,) = events(peers, StateFetched)
        assert isinstance(told, StateFetched)
        assert sum(told.bytes_by_donor.values()) == told.size_bytes
        assert sum(count > 0 for count in told.bytes_by_donor.values()) > 1


def test_a_corrupt_piece_is_refused_and_fetched_elsewhere() -> None:
    with party(("a", "b", "c")) as peers:
        offer(peers, "b", "c")
        peers.donors["c"].lying = True
        assert same(fetch(peers, "bc", MemoryPieces()), some_state())
        refused = events(peers, DonorRefused)
        assert refused
        assert all(event.peer == "c" for event in refused if isinstance(event, DonorRefused))
        assert any("does not have its digest" in event.reason for event in refused if isinstance(event, DonorRefused))


def test_when_all_lie_nothing_is_believed_and_what_is_right_is_kept() -> None:
    with party(("a", "b", "c")) as peers:
        state = offer(peers, "b", "c")
        peers.donors["b"].lying = True
        peers.donors["c"].lying = True
        store = MemoryPieces()
        with pytest.raises(CollectiveError, match="pieces are missing") as caught:
            fetch(peers, "bc", store)
        assert caught.value.blamed == ("b", "c")
        held = store.begin(state.manifest)
        peers.donors["b"].lying = False
        assert same(fetch(peers, "b", store), some_state())
        told = events(peers, StateFetched)[-1]
        assert isinstance(told, StateFetched)
        assert told.kept_bytes == sum(end - first for first, end in map(state.manifest.span, held))


def test_a_donor_that_dies_is_replaced_by_the_others() -> None:
    tensors = {"x": torch.randn(1_000_000)}
    with party() as peers:
        offer(peers, "b", "c", "d", tensors=tensors)
        store = Watched(lambda count: count == 10 and peers.fabrics["c"].close())
        assert same(fetch(peers, "bcd", store), tensors)


class Watched(MemoryPieces):
    """Does something after a number of pieces."""

    def __init__(self, then: Callable[[int], object]) -> None:
        super().__init__()
        self._then, self._count = then, 0

    def write(self, index: int, parts: object) -> None:
        super().write(index, parts)  # type: ignore[arg-type]
        self._count += 1
        self._then(self._count)


def test_a_receiver_that_dies_goes_on_from_what_it_has_on_disk(tmp_path: Path) -> None:
    state = State("step 12", some_state(), PIECE)
    first = FilePieces(tmp_path / "kept")
    assert first.begin(state.manifest) == set()
    for index in (0, 2, 4):
        first.write(index, state.piece(index))
    with (tmp_path / "kept" / "pieces.txt").open("a") as file:
        file.write("5\n3")  # listed, but their bytes never came; the last line cut short
    del first
    with party(("a", "b")) as peers:
        offer(peers, "b")
        assert same(fetch(peers, "b", FilePieces(tmp_path / "kept")), some_state())
        told = events(peers, StateFetched)[-1]
        assert isinstance(told, StateFetched)
        assert told.kept_bytes == 3 * PIECE
    other = State("step 13", {"x": torch.ones(10)}, PIECE)
    assert FilePieces(tmp_path / "kept").begin(other.manifest) == set(), "another state keeps nothing"


def test_donors_of_another_state_are_not_asked() -> None:
    with party() as peers:
        state = offer(peers, "b", "c")
        peers.donors["d"].offer(State("step 12", {"x": torch.zeros(5)}))
        assert same(fetch(peers, "bcd", MemoryPieces()), some_state())
        assert [event.peer for event in events(peers, DonorRefused) if isinstance(event, DonorRefused)] == ["d"]
        assert same(fetch(peers, "bd", MemoryPieces(), state.manifest.digest), some_state()), "the digest decides, not the number"
        with pytest.raises(CollectiveError, match="nobody offers it: d: it holds another state"):
            fetch(peers, "d", MemoryPieces(), state.manifest.digest)
        peers.donors["b"].withdraw("step 12")
        with pytest.raises(CollectiveError, match="no state 'step 12' is offered"):
            fetch(peers, "b", MemoryPieces())


@given(st.integers(0, 30), st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from(["done", "failed", "refused"])), max_size=200))
def test_every_piece_is_fetched_or_refused_by_all(pieces: int, script: list[tuple[str, str]]) -> None:
    pool = WorkPool(range(pieces))
    refused: set[tuple[int, str]] = set()
    for donor, how in [*script, *[(donor, "done") for donor in "xyz" for _ in range(2 * pieces)]]:
        piece = pool.take(donor)
        if piece is None:
            continue
        assert piece in pool.missing
        assert (piece, donor) not in refused
        if how == "done":
            assert pool.done(piece)
        else:
            refused |= {(piece, donor)} if how == "refused" else set()
            pool.failed(piece, donor, refused=how == "refused")
    assert all(all((piece, donor) in refused for donor in "xyz") for piece in pool.missing)


def test_at_the_end_idle_donors_help_the_slow_one() -> None:
    pool = WorkPool([0, 1])
    assert (pool.take("slow"), pool.take("fast")) == (0, 1)
    assert pool.done(1)
    assert pool.take("fast") == 0, "stolen"
    assert pool.take("third") is None, "two are enough"
    assert pool.done(0)
    assert not pool.done(0), "the other one comes too late"
