"""The embedding against POT and its own promises: matching by rank, Jensen's bound, invariances, precision."""

from fractions import Fraction
from math import comb

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cswe.ops import l_moments, rank_coupling, swe, wasserstein_1d

DOUBLE = torch.float64


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(rows):
    return torch.nn.functional.normalize(rows, dim=-1)


def pot_squared(x, y, a=None, b=None):
    return ot.emd2_1d(np.asarray(x), np.asarray(y), a, b, metric="sqeuclidean")


class TestMatching:
    @pytest.mark.parametrize("order", ["reference", "rank"])
    def test_squared_length_is_the_wasserstein_distance_when_sizes_agree(self, order):
        tokens, reference, slices = draw(0, 4, 17, 5), draw(1, 17, 5), unit(draw(2, 6, 5))
        z = swe(tokens, reference, slices, order=order)
        for i in range(4):
            for l in range(6):
                # An unsorted reference: matching by argsort instead of rank would fail here.
                expected = pot_squared(tokens[i] @ slices[l], reference @ slices[l])
                assert abs(float(z[i, l].square().mean()) - expected) < 1e-10

    def test_each_reference_point_receives_the_token_of_its_rank(self):
        tokens = torch.tensor([[[1.0], [2.0], [3.0]]])
        reference = torch.tensor([[20.0], [30.0], [10.0]])  # a 3-cycle: argsort and rank differ
        z = swe(tokens, reference, torch.ones(1, 1))
        torch.testing.assert_close(z[0, 0], torch.tensor([2.0 - 20, 3.0 - 30, 1.0 - 10]))

    def test_the_public_codes_matching_for_comparison(self):
        tokens, reference = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[20.0], [30.0], [10.0]])
        z = swe(tokens, reference, torch.ones(1, 1), order="argsort")
        torch.testing.assert_close(z[0, 0], torch.tensor([3.0 - 20, 1.0 - 30, 2.0 - 10]))
        moved = swe(tokens, reference.sort(0).values, torch.ones(1, 1), order="argsort")
        assert torch.equal(moved, swe(tokens, reference.sort(0).values, torch.ones(1, 1)))  # right where it is sorted
        inputs = draw(3, 2, 7, 3).requires_grad_(), draw(4, 7, 3).requires_grad_(), draw(5, 2, 3).requires_grad_()
        assert torch.autograd.gradcheck(lambda *parts: swe(*parts, order="argsort"), inputs)

    def test_argsort_matching_would_be_seen(self):
        """The mistake of the public code changes the result, so the test above can fail."""
        tokens, reference, slices = draw(0, 1, 17, 3), draw(1, 17, 3), unit(draw(2, 1, 3))
        projected, by_rank = (tokens[0] @ slices[0]).sort().values, (reference @ slices[0]).argsort()
        wrong = projected[by_rank] - reference @ slices[0]
        right = swe(tokens, reference, slices)[0, 0]
        assert not torch.allclose(wrong, right, atol=1e-2)


class TestUnequalSizes:
    @settings(max_examples=150, deadline=None)
    @given(n=st.integers(1, 40), m=st.integers(1, 40), seed=st.integers(0, 10_000), weighted=st.booleans())
    def test_never_longer_than_the_distance(self, n, m, seed, weighted):
        tokens, reference, slices = draw(seed, 8, n, 3), draw(seed + 1, m, 3), unit(draw(seed + 2, 3, 3))
        weights = draw(seed + 3, 8, n).abs() + 0.01 if weighted else None
        z = swe(tokens, reference, slices, weights=weights)  # 24 cases an example
        projected = (tokens @ slices.T).mT
        mass = None if weights is None else weights.unsqueeze(1).expand(projected.shape)
        to_reference = wasserstein_1d(projected, (reference @ slices.T).T.expand(8, -1, -1), mass)
        assert bool((z.square().mean(-1) <= to_reference.square() + 1e-10).all())
        between = wasserstein_1d(projected[:4], projected[4:], *((mass[:4], mass[4:]) if weighted else ()))
        assert bool(((z[:4] - z[4:]).square().mean(-1) <= between.square() + 1e-10).all())

    def test_linear_interpolation_breaks_that_bound(self):
        """Why barycentric is the default."""
        tokens, reference, slices = draw(0, 200, 5, 1), draw(1, 30, 1), torch.ones(1, 1, dtype=DOUBLE)
        z = swe(tokens, reference, slices, interpolation="linear")
        distance = wasserstein_1d(tokens[:100, :, 0], tokens[100:, :, 0])
        assert bool(((z[:100, 0] - z[100:, 0]).square().mean(-1) > distance.square() + 1e-9).any())

    @settings(max_examples=60, deadline=None)
    @given(n=st.integers(1, 50), m=st.integers(1, 50), seed=st.integers(0, 10_000))
    def test_the_mean_is_preserved(self, n, m, seed):
        tokens, reference, slices = draw(seed, 2, n, 4), draw(seed + 1, m, 4), unit(draw(seed + 2, 3, 4))
        z = swe(tokens, reference, slices)
        expected = (tokens.mean(1) - reference.mean(0)) @ slices.T
        torch.testing.assert_close(z.mean(-1), expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("interpolation", ["barycentric"])
    @pytest.mark.parametrize("repeats", [2, 3])
    def test_repeating_every_token_changes_nothing(self, interpolation, repeats):
        tokens, reference, slices = draw(0, 3, 7, 4), draw(1, 10, 4), unit(draw(2, 3, 4))
        z = swe(tokens, reference, slices, interpolation=interpolation)
        repeated = swe(tokens.repeat(1, repeats, 1), reference, slices, interpolation=interpolation)
        torch.testing.assert_close(repeated, z, rtol=0, atol=1e-12)

    def test_weights_are_repetitions(self):
        tokens, reference, slices = draw(0, 1, 4, 3), draw(1, 6, 3), unit(draw(2, 2, 3))
        counts = torch.tensor([3, 1, 0, 2])
        repeated = tokens[0].repeat_interleave(counts, 0).unsqueeze(0)
        weighted = swe(tokens, reference, slices, weights=counts.double().unsqueeze(0))
        torch.testing.assert_close(weighted, swe(repeated, reference, slices), rtol=0, atol=1e-12)

    def test_linear_interpolation_hits_both_ends(self):
        tokens = draw(0, 2, 5, 1)
        z = swe(tokens, torch.zeros(9, 1, dtype=DOUBLE), torch.ones(1, 1), interpolation="linear", order="rank")
        ordered = tokens[..., 0].sort(-1).values
        torch.testing.assert_close(z[:, 0, ::2], ordered, rtol=0, atol=1e-12)
        torch.testing.assert_close(z[:, 0, 1], (ordered[:, 0] + ordered[:, 1]) / 2, rtol=0, atol=1e-12)

    def test_linear_interpolation_on_one_rank_is_the_median(self):
        tokens = torch.tensor([[[9.0], [1.0], [2.0]]])
        z = swe(tokens, torch.zeros(1, 1), torch.ones(1, 1), interpolation="linear")
        assert z.tolist() == [[[2.0]]]


class TestMasks:
    @pytest.mark.parametrize("interpolation", ["barycentric", "linear"])
    @pytest.mark.parametrize("side", ["left", "right", "scattered"])
    def test_padding_is_never_read(self, interpolation, side):
        tokens, reference, slices = draw(0, 3, 6, 4), draw(1, 8, 4), unit(draw(2, 3, 4))
        room = torch.full((3, 10, 4), torch.nan, dtype=DOUBLE)
        places = {"left": range(4, 10), "right": range(6), "scattered": [0, 2, 3, 5, 8, 9]}[side]
        mask = torch.zeros(3, 10, dtype=torch.int64)
        mask[:, list(places)] = 1
        room[:, list(places)] = tokens
        room.requires_grad_()
        expected = swe(tokens, reference, slices, interpolation=interpolation)
        z = swe(room, reference, slices, mask=mask, interpolation=interpolation)
        torch.testing.assert_close(z, expected, rtol=0, atol=1e-12)
        (gradient,) = torch.autograd.grad(z.square().sum(), room)
        assert bool((gradient[mask == 0] == 0).all())
        assert bool(torch.isfinite(gradient).all())

    def test_samples_of_different_lengths_do_not_mix(self):
        reference, slices = draw(1, 8, 4), unit(draw(2, 3, 4))
        tokens, mask = draw(0, 5, 9, 4), torch.arange(9) < torch.tensor([1, 3, 9, 8, 5]).unsqueeze(1)
        z = swe(tokens, reference, slices, mask=mask)
        for i, length in enumerate([1, 3, 9, 8, 5]):
            alone = swe(tokens[i : i + 1, :length], reference, slices)
            torch.testing.assert_close(z[i : i + 1], alone, rtol=0, atol=1e-12)


class TestSymmetries:
    def test_the_order_of_tokens_does_not_matter(self):
        tokens, reference, slices = draw(0, 2, 12, 4), draw(1, 9, 4), unit(draw(2, 3, 4))
        shuffled = tokens[:, torch.randperm(12, generator=torch.Generator().manual_seed(3))]
        torch.testing.assert_close(swe(shuffled, reference, slices), swe(tokens, reference, slices))

    def test_moving_both_sides_changes_nothing(self):
        tokens, reference, slices, shift = draw(0, 2, 12, 4), draw(1, 9, 4), unit(draw(2, 3, 4)), draw(3, 4)
        moved = swe(tokens + shift, reference + shift, slices)
        torch.testing.assert_close(moved, swe(tokens, reference, slices), rtol=0, atol=1e-12)

    def test_slices_are_normalised(self):
        tokens, reference, slices = draw(0, 2, 12, 4), draw(1, 9, 4), draw(2, 3, 4)
        torch.testing.assert_close(swe(tokens, reference, 7 * slices), swe(tokens, reference, slices))


@pytest.mark.parametrize("interpolation", ["barycentric", "linear"])
@pytest.mark.parametrize("n", [1, 5, 6])
@pytest.mark.parametrize("m", [1, 6])
def test_gradients(interpolation, n, m):
    tokens, reference, slices = (
        draw(s, *shape).requires_grad_() for s, shape in enumerate([(2, n, 3), (m, 3), (2, 3)])
    )
    assert torch.autograd.gradcheck(
        lambda *inputs: swe(*inputs, interpolation=interpolation, order="rank"), (tokens, reference, slices)
    )
    assert torch.autograd.gradcheck(
        lambda *inputs: swe(*inputs, interpolation=interpolation), (tokens, reference, slices)
    )


def test_gradients_reach_weights():
    tokens, reference, slices = draw(0, 2, 5, 3), draw(1, 4, 3), draw(2, 2, 3)
    weights = (draw(3, 2, 5).abs() + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: swe(tokens, reference, slices, weights=w), (weights,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_the_float32_answer_of_the_same_numbers(dtype):
    tokens, reference, slices = (draw(s, *shape).to(dtype) for s, shape in enumerate([(2, 50, 16), (50, 16), (4, 16)]))
    expected = swe(tokens.float(), reference.float(), slices.float())
    assert swe(tokens, reference, slices).dtype == torch.float32
    torch.testing.assert_close(swe(tokens, reference, slices), expected)


def test_autocast_is_kept_out():
    tokens, reference, slices = (draw(s, *shape).float() for s, shape in enumerate([(2, 50, 16), (50, 16), (4, 16)]))
    expected, moments = swe(tokens, reference, slices), l_moments(tokens.mT, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(swe(tokens, reference, slices), expected)
        assert torch.equal(l_moments(tokens.mT, 4), moments)


class TestRankCoupling:
    @settings(max_examples=80, deadline=None)
    @given(n=st.integers(1, 60), m=st.integers(1, 60))
    def test_uniform_marginals_are_exact_and_the_entries_few(self, n, m):
        coupling = rank_coupling(n, m)
        dense = coupling.dense()
        assert coupling.mass.numel() == n + m - int(np.gcd(n, m))
        assert bool((coupling.mass > 0).all())
        torch.testing.assert_close(dense.sum(1), torch.full((n,), 1 / n, dtype=DOUBLE), rtol=0, atol=1e-15)
        torch.testing.assert_close(dense.sum(0), torch.full((m,), 1 / m, dtype=DOUBLE), rtol=0, atol=1e-15)
        expected = ot.emd_1d(np.arange(n, dtype=float), np.arange(m, dtype=float))
        np.testing.assert_allclose(dense.numpy(), expected, atol=1e-14)

    @settings(max_examples=60, deadline=None)
    @given(n=st.integers(1, 20), m=st.integers(1, 20), seed=st.integers(0, 10_000))
    def test_weighted(self, n, m, seed):
        a, b = draw(seed, 3, n).abs() + 1e-3, draw(seed + 1, 3, m).abs() + 1e-3
        dense = rank_coupling(a, b).dense()
        a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
        torch.testing.assert_close(dense.sum(-1), a, rtol=0, atol=1e-14)
        torch.testing.assert_close(dense.sum(-2), b, rtol=0, atol=1e-14)
        for i in range(3):
            expected = ot.emd_1d(np.arange(n, dtype=float), np.arange(m, dtype=float), a[i].numpy(), b[i].numpy())
            np.testing.assert_allclose(dense[i].numpy(), expected, atol=1e-12)

    def test_products(self):
        coupling, w, v = rank_coupling(4, 6), draw(0, 2, 6), draw(1, 2, 4)
        torch.testing.assert_close(coupling @ w, w @ coupling.dense().T)
        torch.testing.assert_close(coupling.T @ v, v @ coupling.dense())
        batched = rank_coupling(draw(2, 2, 4).abs(), 6)
        torch.testing.assert_close(batched @ w, torch.einsum("bnm,bm->bn", batched.dense(), w))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_computed_in_float32(self, dtype):
        w = draw(0, 2, 7).to(dtype)
        result = rank_coupling(5, 7) @ w
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, rank_coupling(5, 7) @ w.float())

    def test_errors(self):
        coupling = rank_coupling(2, 3)
        for w, message in (
            (torch.tensor([1, 2, 3]), "right-hand side of @ of a floating-point dtype but got torch.int64"),
            ([1.0, 2.0, 3.0], "right-hand side of @ to be a torch.Tensor but got list"),
        ):
            with pytest.raises(TypeError, match=message):
                coupling @ w
        for w in (torch.tensor(1.0), torch.ones(2)):
            with pytest.raises(ValueError, match=r"right-hand side of shape \(…, 3\) but got"):
                coupling @ w


def test_a_set_of_nothing_ends_no_unvalidated_run():
    tokens, reference, slices = draw(0, 2, 5, 3), draw(1, 4, 3), draw(2, 2, 3)
    mask = torch.tensor([[True] * 5, [False] * 5])
    for interpolation in ("barycentric", "linear"):
        z = swe(tokens, reference, slices, mask, interpolation=interpolation, validate=False)
        expected = swe(tokens[:1], reference, slices, interpolation=interpolation)
        torch.testing.assert_close(z[:1], expected)
    assert l_moments(tokens.mT, 2, mask=mask.unsqueeze(1), validate=False).shape == (2, 3, 2)


class TestLMoments:
    @settings(max_examples=50, deadline=None)
    @given(n=st.integers(1, 300), seed=st.integers(0, 1000))
    def test_the_first_is_the_mean(self, n, seed):
        values = draw(seed, 3, n)
        torch.testing.assert_close(l_moments(values, 1)[..., 0], values.mean(-1), rtol=0, atol=1e-12)
        torch.testing.assert_close(l_moments(values, 5)[..., 0], values.mean(-1), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("n", [1, 2, 7, 40])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_plugin_form_is_the_integral_of_the_quantile_function(self, n, weighted):
        values, k = draw(0, n), 6
        weights = draw(1, n).abs() + 0.05 if weighted else torch.ones(n, dtype=DOUBLE)
        edges = np.concatenate([[0.0], np.cumsum((weights / weights.sum())[values.argsort()].numpy())])
        expected = []
        for j in range(k):
            legendre = np.polynomial.legendre.Legendre.basis(j, domain=[0, 1])
            pieces = np.diff(legendre.integ()(edges))
            expected.append(np.sqrt(2 * j + 1) * float(values.sort().values.numpy() @ pieces))
        moments = l_moments(values, k, weights=weights if weighted else None)
        np.testing.assert_allclose(moments.numpy(), expected, atol=1e-12)

    @pytest.mark.parametrize("n", [5, 6, 30])
    def test_unbiased_form_is_the_textbook(self, n):
        """Hosking's definition: averages over all subsamples of sizes 1 to 4."""
        from itertools import combinations

        values = draw(0, n).sort().values.numpy()
        pairs, triples, fours = (np.array(list(combinations(values, r))) for r in (2, 3, 4))
        textbook = [
            values.mean(),
            0.5 * (pairs[:, 1] - pairs[:, 0]).mean(),
            (triples[:, 2] - 2 * triples[:, 1] + triples[:, 0]).mean() / 3,
            (fours[:, 3] - 3 * fours[:, 2] + 3 * fours[:, 1] - fours[:, 0]).mean() / 4,
        ]
        shuffled = torch.from_numpy(values)[torch.randperm(n)]
        moments = l_moments(shuffled, 4, estimator="unbiased", scale="textbook")
        np.testing.assert_allclose(moments.numpy(), textbook, atol=1e-12)
        scaled = l_moments(shuffled, 4, estimator="unbiased")
        np.testing.assert_allclose(scaled.numpy(), textbook * np.sqrt([1, 3, 5, 7]), atol=1e-12)

    @pytest.mark.parametrize("offset", [0.0, 1e4])
    @pytest.mark.parametrize(("n", "k"), [(60, 24), (196, 40), (12, 12)])
    def test_unbiased_form_of_high_order(self, n, k, offset):
        """Against rational numbers: the textbook's sums of binomials cancel."""
        values = draw(0, n) + offset
        exact = sorted(Fraction(float(value)) for value in values)
        weighted = [sum(comb(i, r) * exact[i] for i in range(n)) / (n * comb(n - 1, r)) for r in range(k)]
        expected = [
            sum((-1) ** (j - r) * comb(j, r) * comb(j + r, r) * weighted[r] for r in range(j + 1)) for j in range(k)
        ]
        found = l_moments(values, k, estimator="unbiased", scale="textbook")
        np.testing.assert_allclose(found.numpy(), np.array(expected, dtype=float), rtol=1e-11, atol=1e-12)

    def test_the_two_estimators_agree_for_many_values(self):
        values = draw(0, 20_000)
        plugin, unbiased = l_moments(values, 4), l_moments(values, 4, estimator="unbiased")
        assert float((plugin - unbiased).abs().max()) < 20 / 20_000

    @settings(max_examples=100, deadline=None)
    @given(n=st.integers(1, 30), m=st.integers(1, 30), seed=st.integers(0, 10_000))
    def test_never_further_apart_than_the_distance(self, n, m, seed):
        x, y = draw(seed, 10, n), draw(seed + 1, 10, m)
        difference = (l_moments(x, 6) - l_moments(y, 6)).square().sum(-1)
        assert bool((difference <= wasserstein_1d(x, y).square() + 1e-10).all())

    def test_weights_are_repetitions_and_masks_are_absences(self):
        values, counts = draw(0, 5), torch.tensor([2, 0, 1, 4, 3])
        repeated = l_moments(values.repeat_interleave(counts), 4)
        torch.testing.assert_close(l_moments(values, 4, weights=counts.double()), repeated, rtol=0, atol=1e-12)
        padded = torch.cat([torch.full((3,), torch.nan, dtype=DOUBLE), values])
        mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
        for estimator in ("plugin", "unbiased"):
            expected = l_moments(values, 4, estimator=estimator)
            torch.testing.assert_close(
                l_moments(padded, 4, mask=mask, estimator=estimator), expected, rtol=0, atol=1e-12
            )

    def test_gradients_reach_values_and_weights(self):
        values, weights = draw(0, 2, 6).requires_grad_(), (draw(1, 2, 6).abs() + 0.1).requires_grad_()
        assert torch.autograd.gradcheck(lambda v, w: l_moments(v, 5, weights=w), (values, weights))
        assert torch.autograd.gradcheck(lambda v: l_moments(v, 5), (values,))

    def test_high_orders_stay_orthonormal(self):
        """The polynomials at order 40: their integrals squared against a fine grid."""
        t = (torch.arange(20_001, dtype=DOUBLE)) / 20_000
        basis = np.polynomial.legendre.Legendre.basis(39, domain=[0, 1])
        values = torch.from_numpy(np.sqrt(79) * basis(t.numpy()))
        steps = torch.diff(t)
        middles = (values[1:] + values[:-1]) / 2
        # A quantile function must ascend: add a ramp, and subtract its moments (only the first two).
        ramp = 1e4 * t[1:]
        moments = l_moments(middles + ramp, 40, weights=steps)
        assert abs(float(moments[39]) - 1) < 1e-2
        assert float(moments[2:39].abs().max()) < 1e-2
