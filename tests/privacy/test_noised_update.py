"""Clipped and noised updates, and what they cost: against NumPy, SciPy's distributions, a closed form, and dp-accounting itself."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from atoll.errors import AtollError, NonFiniteTensorError
from atoll.privacy.accounting import epsilon_of, privacy_spent
from atoll.privacy.noised_update import NoiseLedger, NoiseTerms, clip_factor, gaussian, noise_update, update_norm_squared

KEY = bytes(range(32))
TERMS = NoiseTerms(norm=2.0, multiplier=0.5)


def update_of(seed: int, elements: int = 100_000, size: float = 10.0) -> torch.Tensor:
    drawn = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    return drawn * (size / torch.linalg.vector_norm(drawn))


def noise_of(update: torch.Tensor, sent: torch.Tensor) -> np.ndarray:
    clipped = update.double().numpy() * min(1.0, TERMS.norm / np.linalg.norm(update.double().numpy()))
    return sent.double().numpy() - clipped


@pytest.mark.parametrize("size", [10.0, 0.3])
def test_what_is_sent_is_the_clipped_update_with_gaussian_noise_once(size: float) -> None:
    update = update_of(1, size=size)
    before = update.clone()
    (sent,) = noise_update("rome.1.1", [update], TERMS, NoiseLedger(KEY))
    assert torch.equal(update, before)
    found = noise_of(update, sent) / TERMS.deviation
    assert stats.kstest(found, "norm").pvalue > 1e-3
    assert abs(found.std() - 1) < 0.01  # once: twice would be 1.41
    clipped = update.double().numpy() * min(1.0, TERMS.norm / size)
    assert abs(np.corrcoef(found, clipped)[0, 1]) * math.sqrt(len(found)) < 4


def test_normal_numbers_are_normal_and_independent_between_shards_pieces_and_seeds() -> None:
    drawn = [np.concatenate(list(gaussian(bytes([seed]) * 32, shard, 150_001))) for seed, shard in ((1, 0), (1, 1), (2, 0))]
    for numbers in drawn:
        assert len(numbers) == 150_001
        assert stats.kstest(numbers, "norm").pvalue > 1e-3
        assert abs(stats.kurtosis(numbers)) < 0.06
    pieces = [drawn[0][:65_536], drawn[0][65_536:131_072], drawn[1][:65_536], drawn[2][:65_536], drawn[0][:32_768].repeat(2)]
    for one in range(4):
        for other in range(one):
            assert abs(np.corrcoef(pieces[one], pieces[other])[0, 1]) * 256 < 4
    halves = drawn[0][:65_536].reshape(2, -1)  # sine and cosine of the same angles
    assert abs(np.corrcoef(halves)[0, 1]) * math.sqrt(32_768) < 4
    assert abs(np.corrcoef(halves**2)[0, 1]) * math.sqrt(32_768) < 4


def test_a_retry_sends_the_same_and_draws_nothing() -> None:
    update = [update_of(2, 1000), update_of(3, 70_000)]
    ledger = NoiseLedger(KEY)
    first = noise_update("rome.1.1", update, TERMS, ledger)
    again = noise_update("rome.1.1", [shard.clone() for shard in update], TERMS, ledger)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert ledger.drawn == 1
    restarted = NoiseLedger(KEY, drawn=ledger.drawn - 1)  # its process ended before it was noted that the update was drawn
    assert all(torch.equal(one, other) for one, other in zip(first, noise_update("rome.1.1", update, TERMS, restarted), strict=True))
    with pytest.raises(AtollError, match=r"update rome\.1\.1 was noised with other values before"):
        noise_update("rome.1.1", [update[0] + 1, update[1]], TERMS, ledger)
    assert ledger.drawn == 1
    ledger.forget("rome.1.1")
    assert ledger.drawn == 1


def test_other_updates_values_and_keys_have_other_noise() -> None:
    """Also where a process that was restarted gives a name to other values: their difference is not the updates' difference."""
    update, other = update_of(4), update_of(5)
    noises = [
        noise_of(update, noise_update("rome.1.1", [update], TERMS, NoiseLedger(KEY))[0]),
        noise_of(update, noise_update("rome.1.2", [update], TERMS, NoiseLedger(KEY))[0]),
        noise_of(other, noise_update("rome.1.1", [other], TERMS, NoiseLedger(KEY))[0]),
        noise_of(update, noise_update("rome.1.1", [update], TERMS, NoiseLedger(KEY[::-1]))[0]),
    ]
    for one in range(len(noises)):
        for two in range(one):
            assert abs(np.corrcoef(noises[one], noises[two])[0, 1]) * math.sqrt(len(noises[0])) < 4


def test_values_that_differ_in_the_last_bit_have_other_noise() -> None:
    update = update_of(4, 1000).double()
    nearly = update.clone()
    nearly[0] = torch.nextafter(nearly[0], torch.tensor(math.inf, dtype=torch.float64))
    sent, other = (noise_update("u", [each], TERMS, NoiseLedger(KEY))[0] for each in (update, nearly))
    assert not torch.equal(sent[1:], other[1:])


def test_no_update_is_larger_than_its_norm_rounding_included() -> None:
    for elements, size in ((1, 5.0), (1000, 2.0), (300_000, 1e8), (300_000, 1e-3)):
        update = update_of(6, elements, size)
        factor = clip_factor(update_norm_squared(update), elements, TERMS)
        rounded = np.rint(update.double().numpy() * (factor / TERMS.grid)) * TERMS.grid
        assert np.linalg.norm(rounded) <= TERMS.norm
        if size >= TERMS.norm:
            assert np.linalg.norm(rounded) > 0.999 * TERMS.norm
        else:
            assert factor == 1.0
    shards = [update_of(7, 100, 30.0), update_of(8, 50, 40.0)]
    assert math.sqrt(math.fsum(map(update_norm_squared, shards))) == pytest.approx(50.0, rel=1e-6)


def test_what_is_sent_lies_on_a_grid_that_tells_nothing() -> None:
    """Every value that is sent is one the sum could have from any update: a multiple of the grid, rounded to fp32."""
    terms = NoiseTerms(norm=1.0, multiplier=1.0)
    assert terms.grid == 2.0**-30
    (sent,) = noise_update("u", [update_of(9, 50_000, 1.0)], terms, NoiseLedger(KEY))
    small = sent[sent.abs() < 2.0**-7].double().numpy()  # fp32 keeps all bits of these
    assert len(small) > 100
    assert (np.rint(small / terms.grid) * terms.grid == small).all()


def test_updates_and_terms_that_cannot_be_are_refused() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteTensorError, match="cannot be clipped"):
            noise_update("u", [torch.tensor([1.0, bad])], TERMS, NoiseLedger(KEY))
    for norm, multiplier in ((0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf), (-1.0, 1.0)):
        with pytest.raises(AtollError, match="a positive norm"):
            NoiseTerms(norm=norm, multiplier=multiplier)
    with pytest.raises(AtollError, match="too coarse for 1000000 elements"):
        clip_factor(1.0, 10**6, NoiseTerms(norm=1.0, multiplier=1e6))


# ---- what it costs

CASES = [(1.0, 1, 1e-5), (2.0, 10, 1e-5), (5.0, 100, 1e-6), (20.0, 1000, 1e-6)]


def closed_form(multiplier: float, updates: int, delta: float) -> float:
    """Gaussian noise composes to Gaussian noise, whose (ε, δ) Balle and Wang (2018) give exactly."""
    mu = math.sqrt(updates) / multiplier

    def excess(epsilon: float) -> float:
        return float(stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta)

    return float(optimize.brentq(excess, 0, 100, xtol=1e-12))


@pytest.mark.parametrize(("multiplier", "updates", "delta"), CASES)
def test_epsilon_is_the_librarys_and_the_closed_forms(multiplier: float, updates: int, delta: float) -> None:
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon

    spent = privacy_spent(multiplier, updates, delta)
    assert spent.epsilon_pld == pytest.approx(closed_form(multiplier, updates, delta), abs=1e-3)
    reference = from_gaussian_mechanism(multiplier).self_compose(updates).get_epsilon_for_delta(delta)
    assert spent.epsilon_pld == pytest.approx(reference, abs=1e-3)
    orders = np.asarray(DEFAULT_RDP_ORDERS)
    reference, _ = compute_epsilon(orders, updates * orders / (2 * multiplier**2), delta)  # α/2z² is a Gaussian's Rényi divergence
    assert spent.epsilon_rdp == pytest.approx(reference, abs=1e-3)
    assert spent.epsilon_pld is not None
    assert spent.epsilon_rdp > spent.epsilon_pld
    assert (spent.updates, spent.delta, spent.noise_multiplier) == (updates, delta, multiplier)


def test_what_was_replaced_is_twice_as_far_as_what_was_left_out() -> None:
    pytest.importorskip("dp_accounting")
    for accountant in ("rdp", "pld"):
        replaced = epsilon_of(4.0, 10, 1e-5, accountant, "replaced")  # type: ignore[arg-type]
        assert replaced == epsilon_of(2.0, 10, 1e-5, accountant)  # type: ignore[arg-type]


def test_the_ends_and_what_means_nothing() -> None:
    assert epsilon_of(1.0, 0, 1e-5, "rdp") == 0.0
    assert epsilon_of(0.0, 3, 1e-5, "rdp") == math.inf
    for given in ((-1.0, 1, 1e-5), (math.nan, 1, 1e-5), (1.0, -1, 1e-5), (1.0, 1, 0.0), (1.0, 1, 1.0)):
        with pytest.raises(AtollError, match="a δ between 0 and 1"):
            epsilon_of(*given, "pld")


def test_without_the_library_a_sentence_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['dp_accounting'] = None\nfrom atoll.privacy.accounting import epsilon_of\nepsilon_of(1.0, 1, 1e-5, 'rdp')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("pip install 'atoll[privacy]'")
