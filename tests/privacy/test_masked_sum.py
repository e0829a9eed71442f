"""Masked sums: exact as whole numbers, with any site dropping out anywhere; and what a transcript tells of a single update: nothing."""

import itertools
import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.errors import AtollError, NonFiniteTensorError
from atoll.privacy.fixed_point import agreed_limits, default_bits, pack, packed_bytes, quantise, ring_bits, split_pieces, unpack
from atoll.privacy.mask_stream import add_stream, public_key_of
from atoll.privacy.masked_sum import MaskedUpdate, MaskTerms, Roster, common_seed, own_seed, unmask
from atoll.privacy.masking_site import MaskingSite, RevealLedger
from atoll.privacy.secret_sharing import join_shares, split_secret
from tests.privacy.sites import Session, make_terms, numbers_of, seeded


def exact(numbers: dict[str, torch.Tensor], who: tuple[str, ...]) -> np.ndarray:
    return np.sum([numbers[site].numpy().astype(np.int64) for site in who], axis=0)


@pytest.mark.parametrize(("sites", "bits"), [(3, 8), (4, 8), (5, 7), (8, 2), (16, 6), (7, 16)])
def test_sums_are_exact(sites: int, bits: int) -> None:
    terms = make_terms(sites, 1003, bits)
    numbers = numbers_of(terms, seed=sites)
    session = Session(terms)
    session.share()
    session.mask(numbers)
    session.reveal(terms.sites)
    found = unmask(session.roster, session.participants, list(session.masked.values()), session.revealed)
    assert found.included == terms.sites
    assert found.weight == sum(100.0 * (number + 1) for number in range(sites))
    assert np.array_equal(found.sums.numpy(), exact(numbers, terms.sites))


def test_the_extremes_of_every_ring_add_up() -> None:
    for sites, bits in ((3, 8), (4, 8), (8, 7), (16, 2)):
        terms = make_terms(sites, 16, bits)
        most = 2 ** (bits - 1) - 1
        for value in (most, -most):
            session = Session(terms)
            session.share()
            session.mask({site: torch.full((16,), value, dtype=torch.int32) for site in terms.sites})
            session.reveal(terms.sites)
            found = unmask(session.roster, session.participants, list(session.masked.values()), session.revealed)
            assert (found.sums == sites * value).all()


def test_sums_of_more_than_one_piece_are_exact() -> None:
    terms = make_terms(3, 2**18 + 77)
    numbers = numbers_of(terms, seed=1)
    session = Session(terms)
    session.share()
    session.mask(numbers)
    session.reveal(terms.sites)
    found = unmask(session.roster, session.participants, list(session.masked.values()), session.revealed)
    assert np.array_equal(found.sums.numpy(), exact(numbers, terms.sites))


def test_whoever_drops_out_wherever_the_sum_is_of_the_others() -> None:
    """Five sites, a quorum of three: every pair of sites drops out, each at any of four moments."""
    terms = make_terms(5, 41, bits=7, quorum=3)
    numbers = numbers_of(terms, seed=2)
    for pair in itertools.combinations(terms.sites, 2):
        for moments in itertools.product(range(4), repeat=2):
            gone = dict(zip(pair, moments, strict=True))
            here = [[site for site in terms.sites if gone.get(site, 4) > moment] for moment in range(4)]
            session = Session(terms, began=here[0])
            session.share(here[1])
            session.mask(numbers, here[2])
            session.reveal(here[2], here[3])
            found = unmask(session.roster, session.participants, list(session.masked.values()), session.revealed)
            assert found.included == tuple(here[2])
            assert np.array_equal(found.sums.numpy(), exact(numbers, found.included)), gone


def test_means_are_weighted_by_tokens_and_what_they_lack_is_the_residual() -> None:
    """Against NumPy in float64: the mean of what each site's numbers stand for; and with residuals, of the updates themselves."""
    terms = make_terms(4, 3000, quorum=3)
    made = torch.Generator().manual_seed(3)
    updates = {site: torch.randn(3000, generator=made) * torch.logspace(-4, -1, 3000) for site in terms.sites}
    limits = agreed_limits(updates["s0"] * 0.7)
    session = Session(terms)
    session.share()
    roster = session.roster
    found = {site: quantise(updates[site], limits, terms.bits, roster.share(site)) for site in terms.sites}
    session.mask({site: each.numbers for site, each in found.items()}, ["s0", "s1", "s3"])
    session.reveal(["s0", "s1", "s3"])
    sums = unmask(roster, session.participants, list(session.masked.values()), session.revealed)
    mean = sums.mean(roster, limits).double().numpy()
    weights = {"s0": 100.0, "s1": 200.0, "s3": 400.0}
    assert sums.weight == 700.0
    arrived = sum(w * (updates[site].double() - found[site].residual.double()).numpy() for site, w in weights.items()) / 700.0
    scale = np.abs(arrived).max()
    assert np.abs(mean - arrived).max() < 1e-6 * scale
    steps = np.repeat(limits.double().numpy() / 127, 256)[:3000]
    whole = sum(w * updates[site].double().numpy() for site, w in weights.items()) / 700.0
    inside = np.all([np.abs(updates[site].numpy()) < np.repeat(limits.numpy(), 256)[:3000] for site in weights], axis=0)
    bound = steps * 0.5 * 3 * 400 / 700 + 1e-7  # half a step of the largest weight's for each of three
    assert inside.mean() > 0.9
    assert (np.abs(mean - whole) <= bound)[inside].all()


def test_error_feedback_sends_what_numbers_could_not_say() -> None:
    made = torch.Generator().manual_seed(4)
    update = torch.randn(512, generator=made)
    limits, owed, arrived = torch.full((2,), 0.5), torch.zeros(512), torch.zeros(512)
    for _ in range(40):
        found = quantise(update + owed, limits, 8, share=0.25)
        arrived += update + owed - found.residual
        owed = found.residual
    assert torch.allclose(arrived / 40, update, atol=float(owed.abs().max()) / 40 + 1e-6)
    assert float(owed.abs().max()) > 1  # values beyond the limit of 0.5 / 0.25 are owed for ever: the limit is to be agreed anew


def test_bytes_are_within_a_third_of_unmasked_int8() -> None:
    elements = 10_000_000
    unmasked = sum(part.nbytes for part in make_codec("int8").encode(torch.zeros(elements)).parts)
    for sites in range(3, 17):
        bits = default_bits(sites)
        assert packed_bytes(elements, ring_bits(bits, sites)) <= 1.3 * unmasked
    terms = make_terms(4, 100_000)
    session = Session(terms)
    session.share()
    session.mask(numbers_of(terms, seed=5))
    session.reveal(terms.sites)
    everything = msgspec.msgpack.encode((session.keys, session.boxes, session.revealed))
    masked = sum(each.packed.nbytes for each in session.masked.values())
    plain = 4 * sum(part.nbytes for part in make_codec("int8").encode(torch.randn(100_000)).parts)
    assert masked + len(everything) <= 1.3 * plain


@pytest.mark.parametrize("width", range(2, 25))
def test_packing_is_dense_and_comes_back(width: int) -> None:
    words = np.random.default_rng(width).integers(0, 1 << width, 1003, dtype=np.uint32)
    data = pack(words, width)
    assert len(data) == packed_bytes(1003, width) == width * 126
    assert np.array_equal(unpack(data, 1003, width), words)


# ---- what a transcript tells


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """In standard deviations of what chance gives."""
    a, b = one - one.mean(), other - other.mean()
    return abs(float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))) * math.sqrt(len(a))


def centred(words: np.ndarray, width: int) -> np.ndarray:
    found = words.astype(np.float64)
    return np.where(found >= 1 << (width - 1), found - (1 << width), found)


class Eavesdropper:
    """Everything somebody can compute who has every message of a session: all that was masked, and all masks that can be taken away."""

    def __init__(self, session: Session) -> None:
        self.terms, self.roster, self.session = session.terms, session.roster, session
        width, count = self.terms.width, self.terms.elements
        self.words = {site: unpack(each.packed.numpy().tobytes(), count, width) for site, each in session.masked.items()}
        self.masks: dict[str, list[tuple[bytes, int]]] = {site: [] for site in self.words}  # known ones, of each site
        quorum = self.terms.quorum
        for site in self.roster.keys:
            for kind in ("seeds", "keys"):
                shares = {self.roster.number(each.site): getattr(each, kind).get(site) for each in session.revealed}
                shares = {number: share for number, share in shares.items() if share is not None}
                if len(shares) < quorum:
                    continue
                secret = join_shares(shares, quorum)
                if kind == "seeds" and site in self.words:
                    self.masks[site].append((own_seed(self.roster, site, secret), 1))
                if kind == "keys":
                    assert public_key_of(secret) == self.roster.keys[site].masking_key
                    for other in session.participants:
                        if other != site:
                            seed, sign = common_seed(self.roster, site, secret, other)
                            if other in self.words:
                                self.masks[other].append((seed, -sign))
                            if site in self.words:
                                self.masks[site].append((seed, sign))

    def views(self) -> dict[str, np.ndarray]:
        """Each masked update with every subset of the known masks taken away; sums and differences of pairs of these."""
        width, found = self.terms.width, {}
        for site, words in self.words.items():
            for size in range(len(self.masks[site]) + 1):
                for chosen in itertools.combinations(range(len(self.masks[site])), size):
                    left = words.copy()
                    for each in chosen:
                        seed, sign = self.masks[site][each]
                        add_stream(left, 0, width, seed, -sign)
                    found[f"{site} less {chosen}"] = left
        ring = (1 << width) - 1
        full = {site: f"{site} less {tuple(range(len(self.masks[site])))}" for site in self.words}
        for one, other in itertools.combinations(self.words, 2):
            found[f"{one} + {other}"] = (found[full[one]] + found[full[other]]) & ring
            found[f"{one} - {other}"] = (found[full[one]] - found[full[other]]) & ring
        return {name: centred(words, width) for name, words in found.items()}


ELEMENTS = 20_000
MOST_DEVIATIONS = 5.0
"""Of some hundred views with some updates each: one in a million of these is beyond by chance, and seeds are fixed."""


def run_through(late: str | None) -> tuple[Session, dict[str, torch.Tensor]]:
    """Four sites; with `late` that one's masked update comes when its keys were put together already: the worst there is."""
    terms = make_terms(4, ELEMENTS, quorum=3)
    numbers = numbers_of(terms, seed=6)
    session = Session(terms, seed=7)
    session.share()
    included = [site for site in terms.sites if site != late]
    session.mask(numbers, included)
    session.reveal(included)
    found = unmask(session.roster, session.participants, [session.masked[site] for site in included], session.revealed)
    assert np.array_equal(found.sums.numpy(), exact(numbers, tuple(included)))
    if late is not None:
        session.mask(numbers, [late])
    return session, numbers


@pytest.mark.parametrize("late", [None, "s0", "s2", "s3"])
def test_a_transcript_correlates_with_no_single_update(late: str | None) -> None:
    session, numbers = run_through(late)
    seen = Eavesdropper(session)
    assert all(seen.masks.values())  # something is known of every one, and it is not enough
    views = seen.views()
    assert len(views) >= 20
    for name, view in views.items():
        for site, update in numbers.items():
            assert correlation(view, update.numpy().astype(np.float64)) < MOST_DEVIATIONS, (name, site)
        counts, _ = np.histogram(view, bins=64, range=(-(1 << (session.terms.width - 1)), 1 << (session.terms.width - 1)))
        chi_squared = float(((counts - ELEMENTS / 64) ** 2 / (ELEMENTS / 64)).sum())
        assert chi_squared < 63 + 5 * math.sqrt(2 * 63), (name, chi_squared)  # all numbers of the ring alike


def test_the_statistic_sees_an_update_that_is_there() -> None:
    """Unmasked it is seen, and so it is in the sum, and where a thousandth of the variance is the update's own nothing hides it."""
    session, numbers = run_through(None)
    update = numbers["s1"].numpy().astype(np.float64)
    assert correlation(update, update) > 100
    assert correlation(exact(numbers, session.terms.sites).astype(np.float64), update) > 50
    noise = np.random.default_rng(8).normal(0, update.std() * 10, ELEMENTS)
    assert correlation(noise + update, update) > MOST_DEVIATIONS


def test_who_has_all_of_a_sites_secrets_sees_it_so_the_eavesdropper_does_its_work() -> None:
    """Both kinds of shares of one site, which no honest site gives: then its update lies bare."""
    session, numbers = run_through("s2")
    first, *others = session.revealed
    both = {site: session.sites[site]._seed_shares["s2"] for site in ("s0", "s1", "s3")}
    session.revealed = [msgspec.structs.replace(each, seeds={**each.seeds, "s2": both[each.site]}) for each in (first, *others)]
    views = Eavesdropper(session).views()
    assert max(correlation(view, numbers["s2"].numpy().astype(np.float64)) for view in views.values()) > 100


def test_no_stream_is_used_twice() -> None:
    """Every pair, site, session and piece has a seed or a stream of its own; and a second vector is not masked with the same ones."""
    seeds: set[bytes] = set()
    for number in range(3):
        session = Session(make_terms(4, 8, session=f"round {number}"), seed=9)  # even with the same randomness
        session.share()
        roster = session.roster
        for one, other in itertools.combinations(roster.keys, 2):
            seed, sign = common_seed(roster, one, session.sites[one]._masking_key, other)
            back, opposite = common_seed(roster, other, session.sites[other]._masking_key, one)
            assert (seed, sign) == (back, -opposite)
            seeds.add(seed)
        seeds |= {own_seed(roster, site, each._seed) for site, each in session.sites.items()}
    assert len(seeds) == 3 * (6 + 4)
    streams = []
    for piece in range(2):
        words = np.zeros(4096, dtype=np.uint32)
        add_stream(words, piece, 10, next(iter(seeds)), 1)
        streams.append(centred(words, 10))
    assert correlation(*streams) < MOST_DEVIATIONS


# ---- what is refused


def told(match: str, action: Callable[[], object]) -> None:
    with pytest.raises(AtollError, match=match):
        action()


def test_asked_again_a_site_says_the_same_and_otherwise_nothing() -> None:
    terms = make_terms(4, 100, quorum=3)
    numbers = numbers_of(terms, seed=10)
    session = Session(terms)
    session.share()
    site, boxes = session.sites["s0"], [box for box in session.boxes if box.receiver == "s0"]
    everyone = session.participants
    assert site.keys() == session.keys[0]
    assert site.share(session.keys) == tuple(box for box in session.boxes if box.sender == "s0")
    told("shared its secrets among others already", lambda: site.share(session.keys[:3]))
    first = site.mask(everyone, boxes, numbers["s0"])
    assert site.mask(everyone, boxes, numbers["s0"].clone()) is first
    told("masked other numbers, or for other participants", lambda: site.mask(everyone, boxes, numbers["s1"]))
    told("masked other numbers, or for other participants", lambda: site.mask(everyone[:3], boxes, numbers["s0"]))
    given = site.reveal(("s0", "s1", "s2"))
    assert set(given.seeds) == {"s0", "s1", "s2"}
    assert set(given.keys) == {"s3"}
    assert site.reveal(("s2", "s1", "s0")) == given
    told("gave its shares for a sum of s0, s1, s2 already.* would lay a single update bare", lambda: site.reveal(everyone))


def test_an_update_is_in_no_two_sums_that_differ() -> None:
    terms = make_terms(5, 8, bits=7, quorum=3)
    numbers = numbers_of(terms, seed=11)
    first, second = Session(terms), Session(make_terms(5, 8, bits=7, quorum=3, session="round 3.2"), seed=12)
    for session in (first, second):
        for name, site in session.sites.items():
            site._ledger = first.ledgers[name]
        session.share()
        session.mask(numbers)
    first.reveal(terms.sites)
    told(r"update s0\.1 was in a sum of s0, s1, s2, s3, s4, and is now", lambda: second.sites["s0"].reveal(terms.sites[:4]))
    second.reveal(terms.sites)  # the same sum may be made again
    found = unmask(second.roster, second.participants, list(second.masked.values()), second.revealed)
    assert np.array_equal(found.sums.numpy(), exact(numbers, terms.sites))
    ledger = RevealLedger()
    ledger.enter("s0.1", ["s0", "s1"])
    ledger.forget("s0.1")
    ledger.enter("s0.1", ["s0", "s2"])


def test_terms_that_hide_nothing_are_refused_with_the_reason() -> None:
    told("masking hides nothing from the other of 2 sites: who knows the sum and its own update has", lambda: make_terms(2, 8, quorum=2))
    assert make_terms(2, 8, quorum=2, hide_from="relay").least == 2
    told("a masked sum of one site is its update", lambda: make_terms(1, 8, quorum=1, hide_from="relay"))
    told("must be more than half of them", lambda: make_terms(4, 8, quorum=2))
    told("a quorum of 6 of 5", lambda: make_terms(5, 8, bits=4, quorum=6))
    told("numbers of 24 bits of 3 sites", lambda: make_terms(3, 8, bits=24))
    told("sites with names of their own", lambda: MaskTerms(session="s", sites=("a", "a", "b"), quorum=2, bits=8, elements=1))


def test_a_sum_of_two_is_made_only_where_it_is_hidden_from_a_relay() -> None:
    """Three sites, one drops out: each of the other two would have the other's update as the difference."""
    terms = make_terms(3, 8)
    session = Session(terms)
    session.share()
    session.mask(numbers_of(terms, seed=13), ["s0", "s1"])
    told(r"2 of 3 sites, and it takes 3 \(a sum of fewer would tell a site the other's update\)", lambda: session.reveal(["s0", "s1"]))
    terms = make_terms(3, 8, hide_from="relay")
    numbers = numbers_of(terms, seed=14)
    session = Session(terms)
    session.share()
    session.mask(numbers, ["s0", "s1"])
    session.reveal(["s0", "s1"])
    found = unmask(session.roster, session.participants, list(session.masked.values()), session.revealed)
    assert np.array_equal(found.sums.numpy(), exact(numbers, ("s0", "s1")))


def test_two_sites_and_a_relay_that_sees_nothing() -> None:
    terms = make_terms(2, ELEMENTS, quorum=2, hide_from="relay")
    numbers = numbers_of(terms, seed=15)
    session = Session(terms)
    session.share()
    session.mask(numbers)
    for name, view in Eavesdropper(session).views().items():  # what a relay carries: shares are revealed between the sites
        if "+" not in name:
            for update in numbers.values():
                assert correlation(view, update.numpy().astype(np.float64)) < MOST_DEVIATIONS
    session.reveal(terms.sites)
    found = unmask(session.roster, session.participants, list(session.masked.values()), session.revealed)
    assert np.array_equal(found.sums.numpy(), exact(numbers, terms.sites))


def test_messages_that_were_changed_or_are_anothers_are_refused_with_the_senders_name() -> None:
    terms = make_terms(4, 64, quorum=3)
    numbers = numbers_of(terms, seed=16)
    session = Session(terms)
    session.share()
    boxes = [box for box in session.boxes if box.receiver == "s0"]
    site, everyone = session.sites["s0"], session.participants
    spoilt = msgspec.structs.replace(boxes[1], box=boxes[1].box[:-1] + bytes([boxes[1].box[-1] ^ 1]))
    told("the shares of s2 for s0 were changed", lambda: site.mask(everyone, [boxes[0], spoilt, boxes[2]], numbers["s0"]))
    told("no shares of s1 for s0, so they are no participants", lambda: site.mask(everyone, boxes[1:], numbers["s0"]))
    told("numbers to be masked lie between -127 and 127", lambda: site.mask(everyone, boxes, numbers["s0"] * 3))
    told("64 int32 numbers are masked here, got", lambda: site.mask(everyone, boxes, numbers["s0"][:5]))
    session.mask(numbers)
    session.reveal(terms.sites)
    updates, roster = list(session.masked.values()), session.roster

    def add_up(masked: list[MaskedUpdate] = updates, revealed: object = None) -> object:
        return unmask(roster, everyone, masked, session.revealed if revealed is None else revealed)  # type: ignore[arg-type]

    told("s3 masked its update for another session", lambda: add_up([*updates[:3], msgspec.structs.replace(updates[3], roster=bytes(32))]))
    cut = msgspec.structs.replace(updates[3], packed=updates[3].packed[:-1])
    told("s3: a masked update here is 80 bytes", lambda: add_up([*updates[:3], cut]))
    told("2 sites gave shares for this sum, and it takes 3", lambda: add_up(revealed=session.revealed[:2]))
    told("2 of 4 sites, and it takes 3", lambda: add_up(updates[:2]))
    wrong = {**session.revealed[0].seeds, "s1": session.revealed[0].seeds["s2"]}
    lied = [msgspec.structs.replace(session.revealed[0], seeds=wrong), *session.revealed[1:]]
    told("s1's seed give another one: one of s0, s1, s2, s3 gave a wrong share|secret of s1 cannot be put", lambda: add_up(revealed=lied))
    other = Session(terms, seed=17)
    told("beyond what 4 updates add up to", lambda: add_up([*updates[:3], _masked_by_others(other, numbers, updates[3])]))


def _masked_by_others(other: Session, numbers: dict[str, torch.Tensor], like: MaskedUpdate) -> MaskedUpdate:
    """An update that says it is masked with this session's keys, and is not."""
    other.share()
    other.mask(numbers)
    return msgspec.structs.replace(like, packed=other.masked["s3"].packed)


def test_keys_that_are_none_or_not_the_sites_own_are_refused() -> None:
    session = Session(make_terms(3, 8))
    keys = session.keys
    other = MaskingSite(session.terms, "s0", 1.0, "u", RevealLedger(), seeded(99)).keys()
    told("the keys of s0 are not among those given, or not as it made them", lambda: session.sites["s0"].share([other, *keys[1:]]))
    told("s1 gave a public key that is none", lambda: session.sites["s0"].share([keys[0], _zero_key(keys[1]), keys[2]]))
    told("s2: an update of weight inf", lambda: Roster(session.terms, [*keys[:2], msgspec.structs.replace(keys[2], weight=math.inf)]))
    told("s2 gave keys of session other", lambda: Roster(session.terms, [*keys[:2], msgspec.structs.replace(keys[2], session="other")]))
    told("a site twice cannot be among", lambda: Roster(session.terms, [*keys[:2], keys[1]]))
    told("stranger is none of the sites", lambda: MaskingSite(session.terms, "stranger", 1.0, "u", RevealLedger()))


def _zero_key(keys: object) -> object:
    return msgspec.structs.replace(keys, sealing_key=bytes(32))  # type: ignore[type-var]


def test_updates_without_a_scale_or_not_finite_are_refused() -> None:
    limits = torch.full((1,), 1.0)
    with pytest.raises(NonFiniteTensorError, match="not finite"):
        quantise(torch.tensor([1.0, math.nan]), limits, 8)
    told("2 elements have 1 limits in fp32", lambda: quantise(torch.zeros(2), torch.zeros(3), 8))
    told("limits are finite and between", lambda: quantise(torch.zeros(2), torch.full((1,), math.inf), 8))
    told("above 0 and at most 1, got 1.5", lambda: quantise(torch.zeros(2), limits, 8, 1.5))
    told("no scale follows from a mean whose largest magnitude is 0.0", lambda: agreed_limits(torch.zeros(5)))


def test_shares_below_the_threshold_say_nothing_and_any_threshold_gives_the_secret() -> None:
    secret = bytes(range(32))
    shares = dict(enumerate(split_secret(secret, 3, 5, seeded(20)), 1))
    for chosen in itertools.combinations(shares, 3):
        assert join_shares({number: shares[number] for number in chosen}, 3) == secret
    told("2 shares of a secret that 3 are needed for", lambda: join_shares({1: shares[1], 2: shares[2]}, 3))
    told("what holder 2 gave is no share", lambda: join_shares({**shares, 2: b"\xff" * 33}, 3))
    for guess in (bytes(32), b"\xff" * 32):  # with two shares every secret is as possible as any other: there is a third that gives it
        prime = 2**256 + 297
        points = {0: int.from_bytes(guess), 1: int.from_bytes(shares[1]), 2: int.from_bytes(shares[2])}
        third = 0
        for at, value in points.items():
            term = value
            for other in points:
                if other != at:
                    term = term * (3 - other) * pow(at - other, -1, prime) % prime
            third = (third + term) % prime
        assert join_shares({1: shares[1], 2: shares[2], 3: third.to_bytes(33)}, 3) == guess


def test_pieces_cover_everything_once() -> None:
    pieces = list(split_pieces(2**18 * 2 + 9, 10))
    assert [values.stop for values, _ in pieces] == [2**18, 2**19, 2**19 + 9]
    assert [place.stop for _, place in pieces] == [327_680, 655_360, 655_380]
