"""The schedules that broke earlier versions of the protocol, as far as one worker can withstand them; each also with its check off."""

import pytest

from atoll.control.messages import (
    Ack,
    Attempt,
    Backward,
    Committed,
    Contributor,
    FetchState,
    Finished,
    Forward,
    Manifest,
    Pull,
    PullSum,
    Reduce,
    Reduced,
    Run,
    Seal,
    StageReduction,
    StateChunk,
    SumChunk,
    SumPart,
)
from atoll.simulate.arithmetic import ExactSum
from tests.control.bench import ALL, Bench

KERNEL = 1.2  # forward and backward of the last stage
LANDING = 3.5  # at most
NOBODY = StageReduction((), (), ("x", "x"))


def reduce(*contributors: str, round: tuple[int, int] = (1, 2), owners: tuple[str, str] = ("w", "w")) -> Reduce:
    who = tuple(Contributor(name, 1, (0,)) for name in contributors)
    return Reduce(round, (NOBODY, StageReduction(who, tuple((name, 1) for name in contributors), owners)))


def part(worker: str, chunk: int, value: int, round: tuple[int, int] = (1, 2)) -> SumPart:
    return SumPart(round, 0, 0, 1, chunk, worker, 1, ExactSum(value, 0))


def commit(round: tuple[int, int], digest: str) -> Committed:
    return Committed(0, 0, round, ("", digest), 1.0, False, 0.0, 4.0)


@pytest.mark.parametrize("broken", [False, True])
def test_work_that_ends_after_the_manifest_is_not_added(broken: bool) -> None:
    bench = Bench(*(["freeze"] if broken else []))
    bench.open()
    bench.forward(0)
    bench.run(KERNEL / 2)
    bench.announce(Seal((1, 2)), 2)
    assert bench.reported() == set()
    bench.run(KERNEL + LANDING)
    assert bench.worker.buffers.holds(0) == broken
    assert [ack.owns for ack in bench.sent(Ack)] == [broken]


@pytest.mark.parametrize("broken", [False, True])
def test_a_late_run_does_not_reopen_a_frozen_buffer(broken: bool) -> None:
    bench = Bench(*(["message-order"] if broken else []))
    bench.open()
    bench.announce(Seal((1, 3)), 3)
    bench.open(2)  # overtaken by SEAL
    assert (bench.worker.frozen is None) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_a_doubled_forward_is_summed_once(broken: bool) -> None:
    once, twice = Bench(), Bench(*(["once"] if broken else []))
    for bench, copies in ((once, 1), (twice, 2)):
        bench.open()
        for _ in range(copies):
            bench.forward(0)
        bench.run(2 * (KERNEL + LANDING))
        bench.announce(Seal((1, 2)), 2)
        assert bench.reported() == {0}
    assert (once.value() != twice.value()) == broken


@pytest.mark.parametrize("copies", [1, 2])
def test_a_doubled_backward_is_summed_once(copies: int) -> None:
    bench = Bench(stage=0)
    bench.open()
    attempt = Attempt((1, 1), "f", 1, 0)
    bench.inbox.put(Forward(0, 0, 0, 0, attempt, ("w", "x"), frozenset(), 1000))
    bench.run(KERNEL)
    for _ in range(copies):
        bench.inbox.put(Backward(0, 0, 0, 0, attempt, 5))
    bench.run(2 * (KERNEL + LANDING))
    bench.announce(Seal((1, 2)), 2)
    assert bench.reported() == {0}
    assert [total.value for total in bench.worker.buffers.get(0, 0).value] == [5000, 5]


def test_a_backward_without_its_forward_is_nothing() -> None:
    bench = Bench(stage=0)
    bench.open()
    bench.inbox.put(Backward(0, 0, 0, 0, Attempt((1, 1), "f", 1, 0), 5))
    bench.run(3 * KERNEL)
    assert not bench.worker.buffers.holds(0)


@pytest.mark.parametrize("broken", [False, True])
def test_a_manifest_waits_until_the_sum_has_landed(broken: bool) -> None:
    bench = Bench(*(["atomic-manifest"] if broken else []))
    bench.compute.landing_seconds = 1.0
    bench.open()
    bench.forward(0)
    bench.run(KERNEL + 0.1)  # the kernel is done, its sum is on the way
    bench.announce(Seal((1, 2)), 2)
    if broken:
        assert bench.reported() == {0}
        assert bench.value() == 0
    else:
        assert not bench.sent(Manifest)
        bench.run(20.0)
        assert bench.reported() == {0}
        assert bench.value() != 0


@pytest.mark.parametrize("broken", [False, True])
def test_whoever_comes_back_does_not_contribute_for_who_it_was(broken: bool) -> None:
    bench = Bench(*(["incarnation"] if broken else []))
    bench.open(incarnation=2)
    bench.announce(Seal((1, 2)), 2, incarnation=2)
    bench.inbox.put(Pull((1, 2), 0, 0, 1, 0, "x", 1, (0,)))  # meant for incarnation 1
    bench.run(0.1)
    assert bool(bench.sent(SumPart)) == broken
    bench.announce(reduce("w"), 3, incarnation=2)
    bench.run(0.1)
    assert (bench.worker.reduction is not None) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_a_sum_leaves_the_buffer_as_it_was(broken: bool) -> None:
    bench = Bench(*(["out-of-place"] if broken else []))
    bench.open()
    bench.forward(0)
    bench.run(KERNEL + LANDING)
    own = bench.value()
    bench.announce(Seal((1, 2)), 2)
    bench.announce(reduce("w", "x"), 3)
    for chunk in (0, 1):
        bench.inbox.put(part("w", chunk, own))
        bench.inbox.put(part("x", chunk, 7))
    bench.run(0.1)
    assert bench.sent(Reduced)[-1].digest
    assert (bench.value() != own) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_a_part_of_another_round_is_not_added(broken: bool) -> None:
    bench = Bench(*(["round-match"] if broken else []))
    bench.open()
    bench.announce(Seal((1, 5)), 5)
    bench.announce(reduce("w", "x", round=(1, 5)), 6)
    bench.inbox.put(part("x", 0, 7, round=(1, 2)))
    bench.run(0.1)
    assert bench.worker.reduction is not None
    assert ("x" in bench.worker.reduction.missing()) is True  # chunk 1 is missing in both cases
    bench.inbox.put(part("w", 0, 0, round=(1, 5)))
    bench.run(0.1)
    assert (0 in bench.worker.reduction.sums(1)) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_a_part_that_comes_twice_is_added_once(broken: bool) -> None:
    bench = Bench(*(["duplicate-filter"] if broken else []))
    bench.open()
    bench.announce(Seal((1, 2)), 2)
    bench.announce(reduce("w", "x"), 3)
    for worker, value in (("x", 7), ("x", 7), ("w", 1)):
        bench.inbox.put(part(worker, 0, value))
    bench.run(0.1)
    assert bench.worker.reduction is not None
    assert bench.worker.reduction.sums(1)[0].value == (15 if broken else 8)


def held(bench: Bench, round: tuple[int, int] = (1, 2)) -> str:
    """The worker holds the result of a round."""
    bench.open()
    bench.announce(Seal(round), 2)
    bench.announce(reduce("w", round=round), 3)
    for chunk in (0, 1):
        bench.inbox.put(part("w", chunk, 9, round=round))
    bench.run(0.1)
    return bench.sent(Reduced)[-1].digest


def test_parts_that_are_on_their_way_are_not_asked_for_again() -> None:
    bench = Bench()
    bench.open()
    bench.announce(Seal((1, 2)), 2)
    bench.announce(reduce("a", "b", "c"), 3)
    assert len(bench.sent(Pull)) == 6
    for chunk in (0, 1):
        for worker in ("a", "b", "c"):  # a slow link: one part takes several heart-beats
            bench.run(5.0)
            bench.inbox.put(part(worker, chunk, 1))
            bench.run(0.01)
    assert bench.sent(Pull) == []
    assert bench.worker.reduction is not None
    assert bench.worker.reduction.complete


def test_a_sum_asked_for_before_the_reduction_is_known_is_sent_when_it_is_there() -> None:
    """Another has heard of REDUCE sooner."""
    bench = Bench()
    bench.open()
    bench.announce(Seal((1, 2)), 2)
    for chunk in (0, 1):
        bench.inbox.put(PullSum((1, 2), 0, 0, 1, chunk, "x"))
    bench.run(0.1)
    bench.announce(reduce("a"), 3)
    for chunk in (0, 1):
        bench.inbox.put(part("a", chunk, 5))
    bench.run(0.1)
    assert sorted(message.chunk for message in bench.sent(SumChunk)) == [0, 1]


def test_parts_that_do_not_come_are_asked_for_again_and_ever_more_seldom() -> None:
    bench = Bench()
    bench.open()
    bench.announce(Seal((1, 2)), 2)
    bench.announce(reduce("a"), 3)
    asked = []
    for _ in range(4):
        bench.sent(Pull)
        bench.run(30.0)
        asked.append(len(bench.sent(Pull)))
    assert sum(asked[:2]) > sum(asked[2:]) > 0


@pytest.mark.parametrize("without", ["", "round-digest", "term-digest"])
def test_only_the_committed_result_is_applied(without: str) -> None:
    names = [without] if without else []
    for round, digest, applied in (
        ((1, 2), None, {"", "round-digest", "term-digest"}),  # the very one
        ((1, 7), "other", {"round-digest"}),  # a later round, added in another order
        ((2, 2), "other", {"round-digest"}),  # the same number under another term
        ((1, 2), "other", {"round-digest", "term-digest"}),
    ):
        bench = Bench(*names)
        mine = held(bench)
        bench.open(9, term=3, version=1, commit=commit(round, mine if digest is None else digest))
        bench.run(0.5)
        assert (bench.worker.version == 1) == (without in applied)
        assert (bench.worker.fetch is not None) == (without not in applied)


@pytest.mark.parametrize("broken", [False, True])
def test_a_moved_worker_takes_nothing_along(broken: bool) -> None:
    bench = Bench(*(["clear"] if broken else []))
    bench.open()
    bench.forward(0)
    bench.run(KERNEL + LANDING)
    assert bench.worker.buffers.holds(0)
    bench.announce(Seal((1, 2)), 2, incarnation=2, stage=0)
    bench.run(0.1)
    assert bench.worker.stage == 0
    assert bench.worker.buffers.holds(0) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_a_donor_gives_only_the_version_asked_for(broken: bool) -> None:
    bench = Bench(*(["fetch-version"] if broken else []))
    bench.open()
    bench.inbox.put(FetchState(1, 0, 1, 1, 0, "x"))
    bench.run(0.1)
    assert bool(bench.sent(StateChunk)) == broken
    bench.inbox.put(FetchState(1, 0, 0, 1, 0, "x"))
    bench.run(0.1)
    assert bench.sent(StateChunk)


def test_a_donor_that_is_about_to_have_the_state_answers_when_it_has() -> None:
    bench = Bench()
    digest = held(bench)
    bench.inbox.put(FetchState(1, 0, 1, 1, 0, "x"))  # whoever asks has heard of the commit already
    bench.run(0.1)
    assert not bench.sent(StateChunk)
    bench.open(9, version=1, commit=commit((1, 2), digest))
    bench.run(0.5)
    assert bench.worker.version == 1
    (chunk,) = bench.sent(StateChunk)
    assert (chunk.version, chunk.chunk) == (1, 0)


@pytest.mark.parametrize("broken", [False, True])
def test_chunks_of_two_versions_make_no_state(broken: bool) -> None:
    bench = Bench(*(["fetch-version"] if broken else []))
    run = Run((ALL, ALL), frozenset(), (1, 1))
    bench.announce(run, 1, version=3, donors=("x",))
    first = bench.sent(FetchState)[0]
    bench.inbox.put(StateChunk(first.nonce, 0, 3, 1, 0, (1, 0, 0)))
    bench.announce(run, 4, version=4, donors=("x",))
    bench.inbox.put(StateChunk(first.nonce, 0, 4, 1, 1, (2, 0, 0)))
    bench.run(0.1)
    assert (bench.worker.state is not None) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_work_of_an_older_epoch_is_refused_and_so_is_its_state(broken: bool) -> None:
    bench = Bench(*(["epoch"] if broken else []))
    bench.open()
    bench.worker.state = "of epoch 0"
    bench.open(5, epoch=1)
    bench.run(0.5)
    assert (bench.worker.state == "of epoch 0") == broken
    bench.worker.state = bench.worker.state if not broken else [None]
    bench.forward(0, epoch=0)
    assert bench.worker.kernels._idle != broken


@pytest.mark.parametrize("broken", [False, True])
def test_attempts_of_a_new_lease_count_from_nought_and_are_done(broken: bool) -> None:
    bench = Bench(*(["token"] if broken else []))
    bench.open()
    bench.forward(0, number=3)
    bench.announce(Seal((1, 2)), 2)
    bench.run(KERNEL + LANDING)
    bench.open(5)
    bench.sent(Ack)
    bench.forward(0, round=(1, 5), number=0)
    bench.run(KERNEL + LANDING)
    assert bench.worker.buffers.holds(0) != broken


@pytest.mark.parametrize("check", ["version", "stage"])
def test_work_for_another_version_or_stage_is_refused(check: str) -> None:
    for broken in (False, True):
        bench = Bench(*([check] if broken else []), stage=0 if check == "stage" else 1)
        bench.open(version=0)
        bench.forward(0, version=1 if check == "version" else 0)
        bench.run(KERNEL + LANDING)
        assert bench.worker.buffers.holds(0) == broken


def test_one_that_is_still_fetching_when_the_run_is_over_fetches_no_more() -> None:
    bench = Bench()
    bench.announce(Run((ALL, ALL), frozenset(), (1, 1)), 1, version=3, donors=("x",))
    assert bench.worker.fetch is not None
    bench.announce(Finished(), 2, version=4, donors=("x",))
    bench.run(0.1)
    assert bench.worker.finished
    assert (bench.worker.state, bench.worker.announced) == (None, 4)
