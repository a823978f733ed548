"""LapSum against an oracle that solves for its thresholds by bisection, in value and in every gradient."""

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cswe.ops import LapSum, swgg
from cswe.ops.kernels import backend
from cswe.ops.laplace import CHUNK
from cswe.ops.lapsum import couple, laplace_cdf, thresholds

DOUBLE = torch.float64


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cases():
    generator = torch.Generator().manual_seed(0)
    yield "one", draw(0, 2, 1)
    yield "two", draw(1, 2, 2)
    yield "chunks and one", draw(2, 2, 2 * CHUNK + 1)
    yield "ties", torch.randint(0, 5, (2, CHUNK + 9), generator=generator).double()
    yield "all equal", torch.full((2, CHUNK + 5), 0.3, dtype=DOUBLE)
    yield "far apart", torch.cat([draw(3, 2, 10), 100 + draw(4, 2, 10), 4e3 + draw(5, 2, 3)], -1)


CASES = [pytest.param(values, id=name) for name, values in cases()]


def bisected_thresholds(s, p, levels):
    """Solve Σ p F(b − s) = c by bisection; nothing of the closed form is used."""
    low, high = torch.full_like(levels, float(s.min()) - 60), torch.full_like(levels, float(s.max()) + 60)
    for _ in range(200):
        middle = (low + high) / 2
        too_high = (p * laplace_cdf(middle.unsqueeze(-1) - s)).sum(-1) > levels
        low, high = torch.where(too_high, low, middle), torch.where(too_high, middle, high)
    return (low + high) / 2


def oracle(x, alpha, p=None, ranks=None):
    """The coupling (K, N), written out; differentiable through the implicit thresholds."""
    s = x / alpha
    p = torch.full_like(x, 1 / len(x)) if p is None else p / p.sum()
    ranks = len(x) if ranks is None else ranks
    levels = torch.arange(1, ranks, dtype=DOUBLE) / ranks
    b = bisected_thresholds(s.detach(), p, levels)
    distance = b.unsqueeze(-1) - s
    density = (p * torch.exp(-distance.detach().abs()) / 2).sum(-1)
    residual = (p * laplace_cdf(distance)).sum(-1)
    b = b - (residual - residual.detach()) / density
    shares = laplace_cdf(b.unsqueeze(-1) - s)
    bottom, top = torch.zeros(1, len(x), dtype=DOUBLE), torch.ones(1, len(x), dtype=DOUBLE)
    return torch.cat([bottom, shares, top]).diff(dim=0) * p


def gradients(function, values, w, upstream):
    values, w = values.clone().requires_grad_(), w.clone().requires_grad_()
    result = function(values, w)
    return (result.detach(), *torch.autograd.grad(result, (values, w), upstream))


@pytest.mark.parametrize("alpha", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("values", CASES)
class TestOperator:
    def test_products_and_gradients(self, values, alpha):
        count = values.shape[-1]
        w, upstream = draw(8, *values.shape, 3), draw(9, *values.shape, 3)
        actual = gradients(lambda x, w: LapSum(alpha)(x) @ w, values, w, upstream)
        expected = gradients(
            lambda x, w: torch.stack([count * oracle(row, alpha) @ v for row, v in zip(x, w, strict=True)]),
            values, w, upstream,
        )  # fmt: skip
        self.compare(actual, expected, alpha)
        dense = gradients(lambda x, w: LapSum(alpha)(x).dense() @ w, values, w, upstream)
        self.compare(dense, expected, alpha)

    def test_transposed(self, values, alpha):
        count = values.shape[-1]
        w, upstream = draw(8, *values.shape, 3), draw(9, *values.shape, 3)
        actual = gradients(lambda x, w: LapSum(alpha)(x).T @ w, values, w, upstream)
        expected = gradients(
            lambda x, w: torch.stack([count * oracle(row, alpha).T @ v for row, v in zip(x, w, strict=True)]),
            values, w, upstream,
        )  # fmt: skip
        self.compare(actual, expected, alpha)

    @staticmethod
    def compare(actual, expected, alpha):
        torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-10)
        scale = max(1.0, 1 / alpha)
        for a, b in zip(actual[1:], expected[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9 * scale * max(1.0, float(b.abs().max())))

    def test_rows_and_columns_sum_to_one(self, values, alpha):
        matrix = LapSum(alpha)(values).dense()
        assert bool((matrix >= -1e-15).all())
        ones = torch.ones(values.shape, dtype=DOUBLE)
        torch.testing.assert_close(matrix.sum(-1), ones, rtol=0, atol=1e-10)
        torch.testing.assert_close(matrix.sum(-2), ones, rtol=0, atol=1e-10)
        torch.testing.assert_close(LapSum(alpha)(values) @ ones, ones, rtol=0, atol=1e-10)
        torch.testing.assert_close(LapSum(alpha)(values).T @ ones, ones, rtol=0, atol=1e-10)


def test_gradcheck_ties_included():
    """Continuously differentiable everywhere: finite differences agree at ties too."""
    values, w = (
        torch.tensor([0.3, 0.3, 1.0, 0.3, -1.0, 1.0], dtype=DOUBLE).requires_grad_(),
        draw(1, 6, 2).requires_grad_(),
    )
    assert torch.autograd.gradcheck(lambda x, w: LapSum(0.7)(x) @ w, (values, w))
    assert torch.autograd.gradcheck(lambda x, w: LapSum(0.7)(x).T @ w, (values, w))


def test_row_sums_hold_for_many_points_in_float32():
    values = draw(0, 2048, dtype=torch.float32)
    sums = LapSum(0.01)(values) @ torch.ones(2048)
    assert float((sums - 1).abs().max()) < 1e-6


def test_thresholds_of_any_weights_and_levels():
    s, p = draw(0, 3, 40).sort(-1).values * 3, draw(1, 3, 40).abs()
    p = p / p.sum(-1, keepdim=True)
    levels = torch.rand(3, 25, generator=torch.Generator().manual_seed(2), dtype=DOUBLE).sort(-1).values
    b = thresholds(s, p, levels)
    reached = (p.unsqueeze(-2) * laplace_cdf(b.unsqueeze(-1) - s.unsqueeze(-2))).sum(-1)
    torch.testing.assert_close(reached, levels, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n", "ranks"), [(7, 7), (7, 12), (40, 9), (1, 5), (5, 1)])
def test_couplings_of_weights_with_other_numbers_of_ranks(n, ranks):
    x, p, w = draw(0, n).sort().values, draw(1, n).abs() + 0.1, draw(2, n, 2)
    levels = torch.arange(1, ranks + 1, dtype=DOUBLE) / ranks
    expected = oracle(x, 0.5, p, ranks) @ w
    torch.testing.assert_close(couple(x / 0.5, w, p / p.sum(), levels), expected, rtol=0, atol=1e-11)


def test_padding_is_never_read():
    valid, w = draw(0, 2, 6), draw(1, 2, 6, 3)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 0]])
    room, room_w = torch.full((2, 8), torch.nan, dtype=DOUBLE), torch.full((2, 8, 3), torch.nan, dtype=DOUBLE)
    room[mask == 1], room_w[mask == 1] = valid.flatten(), w.reshape(-1, 3)
    room.requires_grad_()
    product = LapSum(0.3)(room, mask) @ room_w
    torch.testing.assert_close(product[:, :6], LapSum(0.3)(valid) @ w, rtol=0, atol=1e-12)
    assert bool((product[:, 6:] == 0).all())
    product.square().sum().backward()
    assert bool((room.grad[mask == 0] == 0).all())
    assert bool(torch.isfinite(room.grad).all())


def test_a_second_derivative_is_refused():
    values = draw(0, 5).requires_grad_()
    (first,) = torch.autograd.grad((LapSum(0.5)(values) @ draw(1, 5)).square().sum(), values, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second one"):
        first.sum().backward()


@pytest.mark.parametrize("way", ["scan", "cpu"])
class TestCost:
    @settings(max_examples=60, deadline=None)
    @given(
        n=st.integers(1, 12),
        m=st.integers(1, 12),
        seed=st.integers(0, 10_000),
        weighted=st.booleans(),
        tied=st.booleans(),
    )
    def test_never_below_the_exact_distance(self, way, n, m, seed, weighted, tied):
        """The bound that SoftSort can break: 40 cases an example."""
        x, y, slices = draw(seed, 2, n, 2), draw(seed + 1, m, 2), draw(seed + 2, 20, 2)
        if tied:
            x, y = x.round(), y.round()
        p, q = (draw(seed + 3, 2, n).abs() + 0.05, draw(seed + 4, m).abs() + 0.05) if weighted else (None, None)
        with backend(way):
            distances = swgg(x, y, slices, LapSum(0.3 + seed % 7), x_weights=p, y_weights=q)
        for i in range(2):
            a = np.full(n, 1 / n) if p is None else (p[i] / p[i].sum()).numpy()
            b = np.full(m, 1 / m) if q is None else (q / q.sum()).numpy()
            exact = np.sqrt(max(ot.emd2(a, b, ot.dist(x[i].numpy(), y.numpy())), 0))
            assert float(distances[i].min()) >= exact - 1e-7

    @pytest.mark.parametrize(("n", "m"), [(1, 1), (6, 6), (40, 33), (33, 40)])
    def test_every_gradient_is_that_of_the_written_out_plan(self, way, n, m):
        x, y, slices = draw(0, 2, n, 3), draw(1, m, 3), torch.nn.functional.normalize(draw(2, 2, 3), dim=-1)
        inputs = [t.clone().requires_grad_() for t in (x, y, slices)]
        upstream = draw(3, 2, 2)
        with backend(way):
            actual = swgg(*inputs, relaxation=LapSum(0.4))
        again = [t.clone().requires_grad_() for t in (x, y, slices)]
        unit = torch.nn.functional.normalize(again[2], dim=-1)
        rows = []
        for i in range(2):
            for l in range(2):
                Q, P = oracle(again[0][i] @ unit[l], 0.4, ranks=m), oracle(again[1] @ unit[l], 0.4)
                squared = (again[0][i].unsqueeze(1) - again[1].unsqueeze(0)).square().sum(-1)
                rows.append((squared * (m * Q.T @ P)).sum().sqrt())
        expected = torch.stack(rows).reshape(2, 2)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
        for a, b in zip(
            torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, again, upstream), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-8)

    def test_masks_blocks_and_small_temperatures(self, way, monkeypatch):
        x, y, slices = draw(0, 5, 12, 4), draw(1, 9, 4), draw(2, 7, 4)
        mask = torch.arange(12) < torch.tensor([12, 1, 7, 9, 3]).unsqueeze(1)
        room = torch.where(mask.unsqueeze(-1), x, torch.nan)
        with backend(way):
            expected = swgg(room, y, slices, LapSum(0.5), x_mask=mask)
            for i, length in enumerate([12, 1, 7, 9, 3]):
                alone = swgg(x[i : i + 1, :length], y, slices, LapSum(0.5))
                torch.testing.assert_close(expected[i : i + 1], alone, rtol=0, atol=1e-9)
            monkeypatch.setattr("cswe.ops.coupled_cost.BLOCK_ELEMENTS", 300)
            again = swgg(room, y, slices, LapSum(0.5), x_mask=mask)
            torch.testing.assert_close(again, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(swgg(x, y, slices, LapSum(1e-7)), swgg(x, y, slices), rtol=0, atol=1e-5)

    def test_relative_temperature(self, way):
        x, y, slices = 30 * draw(0, 3, 20, 4), draw(1, 15, 4), torch.nn.functional.normalize(draw(2, 5, 4), dim=-1)
        spread = (x @ slices.T).reshape(-1, 5).std(0, correction=0)
        with backend(way):
            relative = swgg(x, y, slices, LapSum(0.2, relative=True))
            for l in range(5):
                absolute = swgg(x, y, slices[l : l + 1], LapSum(0.2 * float(spread[l])))
                torch.testing.assert_close(relative[:, l : l + 1], absolute)


def test_temperature_must_be_positive():
    with pytest.raises(ValueError, match="alpha > 0 but got -1"):
        LapSum(-1)


@pytest.mark.parametrize("alpha", [1e-15, 1e-20, 1e-37])
def test_the_smallest_temperatures_are_the_hard_sort(alpha):
    values = torch.tensor([3.0, 1.0, 2.0])
    assert (LapSum(alpha)(values) @ values).tolist() == [1, 2, 3]


@pytest.mark.parametrize("differentiated", [False, True])
def test_the_dense_form_of_points_far_apart(differentiated):
    """Between them a threshold has neither a slope nor a residual but rounding."""
    values = 100.0 * torch.arange(10, dtype=DOUBLE) + draw(0, 10)
    sort = LapSum(1.0)(values.requires_grad_(differentiated))
    torch.testing.assert_close(sort.dense(), sort @ torch.eye(10, dtype=DOUBLE), rtol=0, atol=1e-12)


def test_in_inference_mode():
    values, w = draw(0, 6), draw(1, 6, 2)
    expected = [each @ w for each in (LapSum(0.7)(values), LapSum(0.7)(values).T)]
    with torch.inference_mode():
        sort = LapSum(0.7)(values.clone())
        for product, known in zip((sort @ w.clone(), sort.T @ w.clone()), expected, strict=True):
            assert torch.equal(product, known)


def test_the_dense_form_has_second_derivatives():
    values, w = draw(0, 6).requires_grad_(), draw(1, 6, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x, w: LapSum(0.7)(x).dense() @ w, (values, w))
