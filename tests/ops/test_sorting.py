"""Sorts as operators: matrix-free products against the dense definition, in value and in every gradient."""

import pytest
import torch

from cswe.ops import HardSort, LapSum, SoftSort
from cswe.ops.laplace import CHUNK

DOUBLE = torch.float64
TEMPERATURES = [1e-3, 1e-2, 0.1, 1.0, 10.0]


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cases():
    """Values that trouble a scan: one point, ties (also across chunks), gaps that underflow, all equal."""
    generator = torch.Generator().manual_seed(0)
    yield "one", draw(0, 2, 1)
    yield "two", draw(1, 2, 2)
    yield "chunk", draw(2, 3, CHUNK)
    yield "chunks and one", draw(3, 2, 3 * CHUNK + 1)
    yield "ties", torch.randint(0, 5, (3, 2 * CHUNK + 7), generator=generator).double()
    yield "ties across chunks", torch.cat([torch.zeros(2, 2 * CHUNK + 3, dtype=DOUBLE), draw(4, 2, 40)], -1)
    yield "all equal", torch.full((2, CHUNK + 5), 0.3, dtype=DOUBLE)
    yield "underflow", torch.cat([draw(5, 2, 30), 1e4 + draw(6, 2, 30), 1e8 + draw(7, 2, 3)], -1)
    yield "tiny gaps", 1e-14 * torch.arange(50, dtype=DOUBLE).repeat(2, 1)


CASES = [pytest.param(values, id=name) for name, values in cases()]


def gradients(function, values, w, upstream):
    values, w = values.clone().requires_grad_(), w.clone().requires_grad_()
    result = function(values, w)
    return (result.detach(), *torch.autograd.grad(result, (values, w), upstream))


def assert_same(actual, expected, tau, w, upstream):
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-12 * float(w.abs().max()))
    scale = float(w.norm() * upstream.norm())
    assert float((actual[1] - expected[1]).norm()) <= 1e-10 * max(1, scale / tau)
    assert float((actual[2] - expected[2]).norm()) <= 1e-10 * max(1, scale)


@pytest.mark.parametrize("tau", TEMPERATURES)
@pytest.mark.parametrize("values", CASES)
class TestSoftSort:
    def test_products_are_those_of_the_dense_matrix(self, values, tau):
        w, upstream = draw(8, *values.shape, 3), draw(9, *values.shape, 3)
        sort = SoftSort(tau)
        actual = gradients(lambda x, w: sort(x) @ w, values, w, upstream)
        expected = gradients(lambda x, w: sort(x).dense() @ w, values, w, upstream)
        assert_same(actual, expected, tau, w, upstream)

    def test_transposed_products_too(self, values, tau):
        w, upstream = draw(8, *values.shape, 3), draw(9, *values.shape, 3)
        sort = SoftSort(tau)
        actual = gradients(lambda x, w: sort(x).T @ w, values, w, upstream)
        expected = gradients(lambda x, w: sort(x).T.dense() @ w, values, w, upstream)
        # A column may collect all N rows, so its sums are up to N times larger.
        assert_same(actual, expected, tau, w * values.shape[-1], upstream)


def test_dense_is_the_papers_formula():
    values, tau = draw(0, 7), 0.3
    matrix = SoftSort(tau)(values).dense()
    for r in range(7):
        row = torch.exp(-(values.sort().values[r] - values).abs() / tau)
        torch.testing.assert_close(matrix[r], row / row.sum())


@pytest.mark.parametrize("tau", [0.05, 1.0])
def test_gradcheck(tau):
    values, w = draw(0, 2, CHUNK + 3).requires_grad_(), draw(1, 2, CHUNK + 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: SoftSort(tau)(x) @ w, (values, w))
    assert torch.autograd.gradcheck(lambda x, w: SoftSort(tau)(x).T @ w, (values, w))


def test_ties_keep_their_order():
    values = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    assert (HardSort()(values) @ torch.arange(5.0)).tolist() == [1, 3, 0, 2, 4]
    # Among ties a soft row is the same for all, so order shows in where gradients of the values go.
    torch.testing.assert_close(SoftSort(1e-3)(values) @ torch.arange(5.0), torch.tensor([2.0, 2, 2, 2, 2]))


def test_a_second_derivative_is_refused():
    values, w = draw(0, 5).requires_grad_(), draw(1, 5).requires_grad_()
    result = (SoftSort(0.5)(values) @ w).square().sum()
    (first,) = torch.autograd.grad(result, values, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second one"):
        first.sum().backward()


@pytest.mark.parametrize("tau", [1e-3, 0.1, 10.0])
def test_float32_gradients(tau):
    values = draw(0, 4, 196, dtype=torch.float32)  # the same float32 numbers on both sides
    w, upstream = draw(1, 4, 196, 8, dtype=torch.float32), draw(2, 4, 196, 8, dtype=torch.float32)
    single = gradients(lambda x, w: SoftSort(tau)(x) @ w, values, w, upstream)
    double = gradients(lambda x, w: SoftSort(tau)(x).dense() @ w, values.double(), w.double(), upstream.double())
    for actual, expected in zip(single, double, strict=True):
        assert float((actual - expected).norm() / expected.norm()) < 1e-4


def test_small_and_large_temperatures_are_the_hard_sort_and_the_mean():
    values, w = draw(0, 3, 50), draw(1, 3, 50)
    torch.testing.assert_close(SoftSort(1e-9)(values) @ w, HardSort()(values) @ w)
    torch.testing.assert_close(SoftSort(1e9)(values) @ w, w.mean(-1, keepdim=True).expand(3, 50), rtol=0, atol=1e-6)


class TestHardSort:
    def test_matrix(self):
        values, w = draw(0, 3, 9), draw(1, 3, 9, 4)
        P = HardSort()(values)
        torch.testing.assert_close(P @ values, values.sort(-1).values)
        torch.testing.assert_close(P @ w, P.dense() @ w)
        torch.testing.assert_close(P.T @ w, P.dense().mT @ w)
        torch.testing.assert_close(P.T @ (P @ w), w)
        assert P.shape == (3, 9, 9)
        assert P.T.T is P

    def test_gradient_reaches_what_is_sorted_but_not_the_keys(self):
        w = draw(1, 9).requires_grad_()
        assert torch.autograd.gradcheck(lambda w: HardSort()(draw(0, 9)) @ w, (w,))


@pytest.mark.parametrize("sort", [HardSort(), SoftSort(0.3), SoftSort(0.3, relative=True)])
def test_padding_is_never_read(sort):
    valid, w = draw(0, 2, 6), draw(1, 2, 6, 3)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 0]])
    room = torch.full((2, 8), torch.nan, dtype=DOUBLE)
    room_w = torch.full((2, 8, 3), torch.nan, dtype=DOUBLE)
    room[mask == 1], room_w[mask == 1] = valid.flatten(), w.reshape(-1, 3)
    room.requires_grad_()
    room_w.requires_grad_()
    P, expected = sort(room, mask), sort(valid)
    product = P @ room_w
    torch.testing.assert_close(product[:, :6], expected @ w, rtol=0, atol=1e-12)
    assert bool((product[:, 6:] == 0).all())
    torch.testing.assert_close((P.T @ room_w.nan_to_num())[mask == 0], torch.zeros(4, 3, dtype=DOUBLE))
    sums = P.dense().sum(-1)
    torch.testing.assert_close(sums, (torch.arange(8) < 6).double().expand(2, 8))
    (product.square().sum()).backward()
    gradients = [room_w.grad] if room.grad is None else [room.grad, room_w.grad]
    for gradient in gradients:
        assert bool((gradient[mask == 0] == 0).all())
        assert bool(torch.isfinite(gradient).all())


class TestRelative:
    def test_the_unit_is_the_spread_of_the_slice_over_the_batch(self):
        values = draw(0, 5, 3, 20) * torch.tensor([1.0, 10.0, 100.0], dtype=DOUBLE).reshape(1, 3, 1)
        w = draw(1, 5, 3, 20)
        spread = values.transpose(0, 1).reshape(3, -1).std(-1, correction=0).reshape(1, 3, 1)
        relative, absolute = SoftSort(0.2, relative=True)(values) @ w, SoftSort(0.2)(values / spread) @ w
        torch.testing.assert_close(relative, absolute)

    def test_no_gradient_flows_through_the_unit(self):
        values, w = draw(0, 5, 3, 20).requires_grad_(), draw(1, 5, 3, 20)
        spread = values.detach().transpose(0, 1).reshape(3, -1).std(-1, correction=0).reshape(1, 3, 1)
        (relative,) = torch.autograd.grad((SoftSort(0.2, relative=True)(values) @ w).square().sum(), values)
        (absolute,) = torch.autograd.grad((SoftSort(0.2)(values / spread) @ w).square().sum(), values)
        torch.testing.assert_close(relative, absolute)

    def test_equal_values_have_no_spread_and_no_trouble(self):
        values = torch.ones(2, 3, 4)
        torch.testing.assert_close(SoftSort(1.0, relative=True)(values) @ values, values)

    @pytest.mark.parametrize("sort", [SoftSort, LapSum])
    @pytest.mark.parametrize("masked", [False, True])
    def test_the_rounding_of_a_mean_is_no_spread(self, sort, masked):
        """Tokens that are all the same: in a unit of 1e-8 the gradient of the slices would be noise, a thousandfold."""
        for number in (0.1, 3.3, 1000.1):
            for count in (3, 7, 100, 1000):
                values = torch.full((16, 2, count), number)
                mask = (torch.arange(count) < 2).expand(values.shape) if masked else None
                assert sort(1.0, relative=True).scale(values, mask).tolist() == [[1.0], [1.0]]
        barely = 1000 + torch.tensor([[[-0.001, 0.001]]])
        assert float(sort(1.0, relative=True).scale(barely)) == pytest.approx(0.001, rel=0.05)


def test_vectors_and_matrices_broadcast():
    values = draw(0, 4, 3, 6)
    P = SoftSort(0.5)(values)
    w = draw(1, 6)
    torch.testing.assert_close(P @ w, (P.dense() @ w.unsqueeze(-1)).squeeze(-1))
    w = draw(2, 3, 6)
    torch.testing.assert_close(P @ w, (P.dense() @ w.unsqueeze(-1)).squeeze(-1))
    w = draw(3, 4, 1, 6, 2)
    torch.testing.assert_close(P @ w, P.dense() @ w)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    values, w = draw(0, 30).to(dtype), draw(1, 30).to(dtype)
    result = SoftSort(0.1)(values) @ w
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, SoftSort(0.1)(values.float()) @ w.float())


@pytest.mark.parametrize("sort", [HardSort(), SoftSort(0.1), LapSum(0.1)])
def test_autocast_is_kept_out(sort):
    values, w = draw(0, 4, 40, dtype=torch.float32), draw(1, 4, 40, 3, dtype=torch.float32)
    found = []
    for enabled in (False, True):
        inputs = values.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            P = sort(inputs[0])
            both = P @ inputs[1], P.T @ inputs[1]
            found.append([*both, *torch.autograd.grad(sum(each.square().sum() for each in both), inputs[1])])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sort", [SoftSort, LapSum])
class TestUnit:
    def test_it_is_what_a_relative_temperature_is_measured_in(self, sort):
        values, unit = draw(0, 4, 2, 7), torch.tensor([[2.0], [30.0]], dtype=DOUBLE)
        given = sort(0.3, relative=True, unit=unit)(values) @ values
        torch.testing.assert_close(given, sort(0.3)(values / unit) @ values)

    def test_errors(self, sort):
        with pytest.raises(ValueError, match="give relative=True too"):
            sort(0.3, unit=torch.ones(2, 1))
        with pytest.raises(TypeError, match=r"unit to be a torch\.Tensor but got float"):
            sort(0.3, relative=True, unit=2.0)
        with pytest.raises(ValueError, match=r"unit of shape \(2, 1\), one number per slice, but got \(2,\)"):
            sort(0.3, relative=True, unit=torch.ones(2))(draw(0, 4, 2, 7))


class TestErrors:
    def test_temperature(self):
        with pytest.raises(ValueError, match="tau > 0 but got 0"):
            SoftSort(0)
        with pytest.raises(ValueError, match=r"tau ≥ 1\.18e-38, which float32 can carry, but got 1e-40"):
            SoftSort(1e-40)
        for wrong in ("0.1", None, torch.tensor(0.1, requires_grad=True)):
            for sort in (SoftSort, LapSum):
                with pytest.raises(TypeError, match=r"temperature (tau|alpha) that is a number, a constant, but got"):
                    sort(wrong)

    def test_right_hand_side(self):
        P = HardSort()(draw(0, 2, 5))
        with pytest.raises(ValueError, match=r"\(2, 5\) or \(2, 5, D\) but got \(2, 4\)"):
            P @ draw(1, 2, 4)
        with pytest.raises(ValueError, match=r"but got \(3, 5, 2\)"):
            P @ draw(1, 3, 5, 2)

    def test_empty(self):
        with pytest.raises(ValueError, match="N ≥ 1"):
            HardSort()(torch.zeros(2, 0))
        with pytest.raises(ValueError, match="sample 1 without a single valid token"):
            HardSort()(torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 0, 0]]))
