"""Lifted plans and their cost: against POT where nothing ties, against the literal quotient formula where it does."""

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cswe.ops import SoftSort, lifted_plan, rank_coupling, sliced, sliced_wasserstein, swgg, wasserstein_1d
from cswe.ops.kernels import dense, scan
from cswe.ops.kernels.problem import Problem

DOUBLE = torch.float64


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(rows):
    return torch.nn.functional.normalize(rows, dim=-1)


def grid_points(seed, *shape):
    """Points on a small grid: many projections tie."""
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def quotient_plan(x, y, theta, p, q):
    """The paper's lifted plan, word for word: group equal projections, couple the groups, spread by mass."""
    px, py = (x @ theta).numpy().round(9), (y @ theta).numpy().round(9)
    xs, ys = np.unique(px), np.unique(py)
    group_p = np.array([p[px == v].sum() for v in xs])
    group_q = np.array([q[py == v].sum() for v in ys])
    coupling = ot.emd_1d(xs, ys, group_p, group_q / group_q.sum() * group_p.sum())
    plan = np.zeros((len(px), len(py)))
    for k in range(len(px)):
        for j in range(len(py)):
            a, b = np.searchsorted(xs, px[k]), np.searchsorted(ys, py[j])
            plan[k, j] = p[k] * q[j] / (group_p[a] * group_q[b]) * coupling[a, b]
    return plan


def cost(x, y, plan):
    return np.sqrt((ot.dist(x.numpy(), y.numpy()) * plan).sum())


class TestHardPlan:
    @settings(max_examples=60, deadline=None)
    @given(n=st.integers(1, 15), m=st.integers(1, 15), seed=st.integers(0, 10_000))
    def test_untied_is_the_plan_of_pot(self, n, m, seed):
        x, y, theta = draw(seed, n, 3), draw(seed + 1, m, 3), unit(draw(seed + 2, 3))
        plan = ot.emd_1d((x @ theta).numpy(), (y @ theta).numpy())
        np.testing.assert_allclose(lifted_plan(x, y, theta).numpy(), plan, atol=1e-12)
        distance = float(swgg(x.unsqueeze(0), y, theta.unsqueeze(0)))
        assert abs(distance - cost(x, y, plan)) < 1e-8
        assert distance**2 >= ot.emd2([], [], ot.dist(x.numpy(), y.numpy())) - 1e-9

    @settings(max_examples=80, deadline=None)
    @given(n=st.integers(1, 12), m=st.integers(1, 12), seed=st.integers(0, 10_000), axis=st.integers(0, 2))
    def test_tied_and_weighted_is_the_quotient_formula(self, n, m, seed, axis):
        x, y, theta = grid_points(seed, n, 2), grid_points(seed + 1, m, 2), [(1.0, 0.0), (0.0, 1.0), (0.6, 0.8)][axis]
        theta = torch.tensor(theta, dtype=DOUBLE)
        p, q = draw(seed + 2, n).abs() + 0.05, draw(seed + 3, m).abs() + 0.05
        p, q = (p / p.sum()).numpy(), (q / q.sum()).numpy()
        plan = quotient_plan(x, y, theta, p, q)
        weights = torch.from_numpy(p), torch.from_numpy(q)
        np.testing.assert_allclose(lifted_plan(x, y, theta, *weights).numpy(), plan, atol=1e-12)
        distance = swgg(x.unsqueeze(0), y, theta.unsqueeze(0), x_weights=weights[0].unsqueeze(0), y_weights=weights[1])
        assert abs(float(distance) - cost(x, y, plan)) < 1e-7

    def test_a_tied_set_is_at_a_distance_from_itself(self):
        points = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=DOUBLE)
        distance = swgg(points.unsqueeze(0), points, torch.tensor([[1.0, 0.0]], dtype=DOUBLE))
        assert abs(float(distance) - 1 / np.sqrt(3)) < 1e-12

    def test_marginals_of_several_directions(self):
        x, y, p = grid_points(0, 7, 2), grid_points(1, 5, 2), draw(2, 7).abs()
        plan = lifted_plan(x, y, draw(3, 4, 2), x_weights=p)
        assert plan.shape == (4, 7, 5)
        torch.testing.assert_close(plan.sum(-1), (p / p.sum()).expand(4, 7), rtol=0, atol=1e-14)
        torch.testing.assert_close(plan.sum(-2), torch.full((4, 5), 0.2, dtype=DOUBLE), rtol=0, atol=1e-14)


def relaxed_oracle(x, y, theta, tau, p=None, q=None):
    """Cost of Qᵀ Λ P with all matrices written out."""
    Q, P = SoftSort(tau)(x @ theta).dense(), SoftSort(tau)(y @ theta).dense()
    n, m = x.shape[0], y.shape[0]
    by_rank = (torch.argsort(v @ theta, stable=True) for v in (x, y))
    coupling = rank_coupling(*(k if w is None else w[o] for k, w, o in zip((n, m), (p, q), by_rank, strict=True)))
    plan = Q.T @ coupling.dense() @ P
    squared = (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1)
    return (squared * plan).sum().sqrt()


class TestRelaxed:
    @pytest.mark.parametrize("tau", [1e-3, 0.1, 1.0, 10.0])
    @pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (6, 1), (40, 40), (33, 70), (70, 33)])
    def test_every_gradient_is_that_of_the_written_out_cost(self, tau, n, m):
        x, y, slices = draw(0, 2, n, 3), draw(1, m, 3), unit(draw(2, 2, 3))
        inputs = [t.clone().requires_grad_() for t in (x, y, slices)]
        upstream = draw(3, 2, 2)
        actual = swgg(*inputs, relaxation=SoftSort(tau))
        gradients = torch.autograd.grad(actual, inputs, upstream)
        again = [t.clone().requires_grad_() for t in (x, y, slices)]
        expected = torch.stack(
            [
                torch.stack([relaxed_oracle(again[0][i], again[1], unit(again[2])[l], tau) for l in range(2)])
                for i in range(2)
            ]
        )
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        for a, b in zip(gradients, torch.autograd.grad(expected, again, upstream), strict=True):
            assert float((a - b).norm()) <= 1e-9 * max(1.0, float(b.norm())) / min(tau, 1.0)

    def test_weights(self):
        x, y, slices = draw(0, 2, 9, 3), draw(1, 7, 3), unit(draw(2, 2, 3))
        p, q = draw(3, 2, 9).abs() + 0.1, draw(4, 7).abs() + 0.1
        actual = swgg(x, y, slices, SoftSort(0.3), x_weights=p, y_weights=q)
        for i in range(2):
            for l in range(2):
                assert abs(float(actual[i, l]) - float(relaxed_oracle(x[i], y, slices[l], 0.3, p[i], q))) < 1e-10

    def test_small_temperature_is_the_hard_cost(self):
        x, y, slices = draw(0, 3, 20, 4), draw(1, 15, 4), draw(2, 5, 4)
        torch.testing.assert_close(swgg(x, y, slices, SoftSort(1e-9)), swgg(x, y, slices))

    def test_gradcheck(self):
        inputs = tuple(draw(s, *shape).requires_grad_() for s, shape in enumerate([(2, 5, 3), (4, 3), (2, 3)]))
        assert torch.autograd.gradcheck(lambda *a: swgg(*a, relaxation=SoftSort(0.5)), inputs)

    def test_relative_temperature(self):
        x, y, slices = 30 * draw(0, 3, 20, 4), draw(1, 15, 4), unit(draw(2, 5, 4))
        spread = (x @ slices.T).reshape(-1, 5).std(0, correction=0)
        relative = swgg(x, y, slices, SoftSort(0.2, relative=True))
        for l in range(5):
            absolute = swgg(x, y, slices[l : l + 1], SoftSort(0.2 * float(spread[l])))
            torch.testing.assert_close(relative[:, l : l + 1], absolute)

    def test_soft_plans_may_undercut_the_distance(self):
        """Known and documented: the marginals of SoftSort are not exact."""
        x, y = torch.tensor([0, 0.1, 0.2, 5], dtype=DOUBLE), torch.tensor([0, 0.1, 0.2, 0.3], dtype=DOUBLE)
        distance = swgg(x.reshape(1, 4, 1), y.reshape(4, 1), torch.ones(1, 1), SoftSort(5.0))
        assert abs(float(distance) - 2.185) < 1e-3
        assert abs(float(wasserstein_1d(x, y)) - 2.350) < 1e-3

    def test_a_second_derivative_is_refused(self):
        x, y, slices = draw(0, 1, 5, 3), draw(1, 4, 3), draw(2, 2, 3).requires_grad_()
        (first,) = torch.autograd.grad(swgg(x, y, slices, SoftSort(0.5)).sum(), slices, create_graph=True)
        with pytest.raises(NotImplementedError, match=r'no second.*cswe\.backend\("dense"\)'):
            first.sum().backward()


@pytest.mark.parametrize("relaxation", [None, SoftSort(0.3), SoftSort(0.5, relative=True)])
class TestBothPlans:
    def test_masks(self, relaxation):
        x, y, slices = draw(0, 3, 12, 4), draw(1, 9, 4), draw(2, 3, 4)
        lengths = [12, 1, 7]
        room = torch.full((3, 15, 4), torch.nan, dtype=DOUBLE)
        mask = torch.zeros(3, 15, dtype=torch.bool)
        for i, length in enumerate(lengths):
            mask[i, 15 - length :] = True
            room[i, 15 - length :] = x[i, :length]
        room.requires_grad_()
        masked = swgg(room, y, slices, relaxation, x_mask=mask)
        (gradient,) = torch.autograd.grad(masked.sum(), room)
        assert bool((gradient[~mask] == 0).all())
        assert bool(torch.isfinite(gradient).all())
        if relaxation is not None and relaxation.relative:
            return  # alone, a sample would be measured by its own spread
        for i, length in enumerate(lengths):
            alone = swgg(x[i : i + 1, :length], y, slices, relaxation)
            torch.testing.assert_close(masked[i : i + 1], alone, rtol=0, atol=1e-9)

    def test_a_reference_per_sample(self, relaxation):
        x, slices = draw(0, 3, 12, 4), draw(2, 3, 4)
        y, y_mask = draw(1, 3, 9, 4), torch.arange(9) < torch.tensor([9, 4, 1]).unsqueeze(1)
        inputs = [x.clone().requires_grad_(), y.clone().requires_grad_(), slices.clone().requires_grad_()]
        distance = swgg(*inputs, relaxation=relaxation, y_mask=y_mask)
        used = inputs[:2] if relaxation is None else inputs
        gradients = torch.autograd.grad(distance.sum(), used)
        assert bool((gradients[1][~y_mask] == 0).all())
        if relaxation is not None and relaxation.relative:
            return
        again = [x.clone().requires_grad_(), y.clone().requires_grad_(), slices.clone().requires_grad_()]
        alone = [swgg(again[0][i : i + 1], again[1][i, : int(y_mask[i].sum())], again[2], relaxation) for i in range(3)]
        torch.testing.assert_close(distance, torch.cat(alone), rtol=0, atol=1e-9)
        expected = torch.autograd.grad(torch.cat(alone).sum(), again[:2] if relaxation is None else again)
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)

    def test_order_and_place_do_not_matter(self, relaxation):
        x, y, slices, shift = draw(0, 2, 12, 4), draw(1, 9, 4), draw(2, 3, 4), 5 * draw(3, 4)
        expected = swgg(x, y, slices, relaxation)
        shuffled = swgg(x[:, torch.randperm(12)], y[torch.randperm(9)], slices, relaxation)
        torch.testing.assert_close(shuffled, expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(swgg(x + shift, y + shift, slices, relaxation), expected, rtol=0, atol=1e-9)

    def test_far_from_the_origin_float32_still_holds(self, relaxation):
        x, y, slices = draw(0, 2, 50, 4), draw(1, 50, 4), draw(2, 3, 4)
        expected = swgg(x, y, slices, relaxation)
        far = swgg((x + 1000).float(), (y + 1000).float(), slices.float(), relaxation)
        assert float((far - expected).abs().max()) < 2e-3

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_and_autocast(self, relaxation, dtype):
        x, y, slices = (draw(s, *shape).to(dtype) for s, shape in enumerate([(2, 30, 8), (30, 8), (3, 8)]))
        expected = swgg(x.float(), y.float(), slices.float(), relaxation)
        assert swgg(x, y, slices, relaxation).dtype == torch.float32
        torch.testing.assert_close(swgg(x, y, slices, relaxation), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(swgg(x.float(), y.float(), slices.float(), relaxation), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    def test_a_sample_that_is_the_reference(self, relaxation, dtype):
        y = draw(0, 20, 4).to(dtype)
        inputs = [y.unsqueeze(0).clone().requires_grad_(), y.clone().requires_grad_(), draw(1, 3, 4).to(dtype)]
        distance = swgg(*inputs, relaxation=relaxation)
        if relaxation is None:
            assert float(distance.detach().abs().max()) == 0
        for gradient in torch.autograd.grad(distance.sum(), inputs[:2]):
            assert bool(torch.isfinite(gradient).all())

    def test_blocks_of_slices_and_samples_change_nothing(self, relaxation, monkeypatch):
        x, y, slices = draw(0, 5, 12, 4), draw(1, 9, 4), draw(2, 7, 4)
        inputs = [t.clone().requires_grad_() for t in (x, y)]
        expected = swgg(*inputs, slices, relaxation)
        gradients = torch.autograd.grad(expected.sum(), inputs)
        monkeypatch.setattr("cswe.ops.exact.BLOCK_ELEMENTS", 600)
        monkeypatch.setattr("cswe.ops.kernels.scan.BLOCK_ELEMENTS", 3000)
        blocked = swgg(*inputs, slices, relaxation)
        torch.testing.assert_close(blocked, expected, rtol=0, atol=1e-12)
        for a, b in zip(torch.autograd.grad(blocked.sum(), inputs), gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_hard_gradients():
    x, y = draw(0, 2, 5, 3).requires_grad_(), draw(1, 4, 3).requires_grad_()
    p, q = (draw(2, 2, 5).abs() + 0.1).requires_grad_(), (draw(3, 4).abs() + 0.1).requires_grad_()
    slices = draw(4, 3, 3)
    assert torch.autograd.gradcheck(lambda x, y, p, q: swgg(x, y, slices, x_weights=p, y_weights=q), (x, y, p, q))


@pytest.mark.parametrize("per_sample", [False, True])
def test_a_few_ties_among_many_pairs(per_sample):
    """Two routes meet in one batch: samples and slices that tie, and those that do not."""
    x, y, slices = draw(0, 8, 9, 2), draw(1, *((8,) if per_sample else ()), 7, 2), draw(2, 6, 2)
    slices[0] = torch.tensor([1.0, 0.0])
    x[3, 4, 0] = x[3, 2, 0]  # ties in one sample, along one slice
    weights = draw(3, 8, 9).abs() + 0.1
    inputs = [t.clone().requires_grad_() for t in (x, y)]
    together = swgg(*inputs, slices, x_weights=weights)
    gradients = torch.autograd.grad(together.sum(), inputs)
    again = [t.clone().requires_grad_() for t in (x, y)]
    rows = []
    for i in range(8):
        reference = again[1][i] if per_sample else again[1]
        plans = lifted_plan(x[i], reference.detach(), slices, x_weights=weights[i])
        squared = (again[0][i].unsqueeze(1) - reference.unsqueeze(0)).square().sum(-1)
        rows.append((squared * plans).sum((-1, -2)).sqrt())
    expected = torch.stack(rows)
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-9)
    for a, b in zip(gradients, torch.autograd.grad(expected.sum(), again), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_nothing_large_is_stored():
    """The widest tensor made is far below B·L·N·d and B·L·N·N, in forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            outputs = result if isinstance(result, tuple | list) else [result]
            for tensor in outputs:
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
            return result

    batch, slices, count, width = 16, 64, 512, 64
    x, y = draw(0, batch, count, width, dtype=torch.float32), draw(1, count, width, dtype=torch.float32)
    theta = draw(2, slices, width, dtype=torch.float32).requires_grad_()
    for relaxation in (None, SoftSort(0.1)):
        with Largest() as largest:
            distance = swgg(x, y.requires_grad_(), theta, relaxation)
            distance.sum().backward()
        assert largest.numel <= batch * slices * count * width // 4, relaxation


def test_kernels_on_problems_with_ties_and_lengths():
    """The scan against the dense definition where sorted points tie, also across chunks, and samples are ragged."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randint(0, 12, (3, 2, 80), generator=generator).double().sort(-1).values
    points[0, 0, 20:70] = points[0, 0, 20]  # one tie wider than a chunk
    points = points.sort(-1).values
    order = torch.argsort(torch.rand(3, 2, 80, generator=generator), -1)
    for lengths in (None, torch.tensor([80, 33, 1])):
        if lengths is not None:
            # The valid tokens are the first ones, in some order.
            keys = torch.rand(3, 2, 80, generator=generator) + (torch.arange(80) >= lengths.reshape(3, 1, 1))
            order = torch.argsort(keys, -1)
        problem = Problem(
            points=points.clone().requires_grad_(),
            order=order,
            tokens=draw(1, 3, 80, 5).requires_grad_(),
            squares=draw(2, 3, 80).requires_grad_(),
            targets=draw(3, 2, 45, 5).requires_grad_(),
            centre=draw(4, 5),
            lengths=lengths,
            positions=None,
            mass=None,
            tau=0.7,
        )
        inputs = [problem.points, problem.tokens, problem.squares, problem.targets]
        upstream = draw(5, 3, 2)
        expected = dense.value(problem)
        gradients = torch.autograd.grad(expected, inputs, upstream)
        with torch.no_grad():
            value, slope = scan.value_and_slope(problem, with_slope=True)
            targets = scan.targets_gradient(problem, upstream)
            tokens, squares = scan.tokens_gradient(problem, upstream)
        torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-10)
        for a, b in zip((slope * upstream.unsqueeze(-1), tokens, squares, targets), gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


class TestDistancesOnTheLine:
    @pytest.mark.parametrize(("p", "moved"), [(2.5, 3.0), (40, 10.0), (100, 0.1), (100, 1e-3)])
    def test_high_orders(self, p, moved):
        x, massless = torch.zeros(3), torch.tensor([1.0, 0.0, 1.0])
        for weights in (None, massless):
            assert abs(float(wasserstein_1d(x, x + moved, weights, p=p)) / moved - 1) < 1e-5
        x, shift = torch.zeros(2, 4, 3), torch.tensor([moved, 0, 0])
        distance = sliced_wasserstein(x, x + shift, torch.eye(3), p=p)
        torch.testing.assert_close(distance, torch.full((2,), moved * 3 ** (-1 / p)))
        slices = torch.eye(3)[[0, 1, 1]]
        seen, far = torch.tensor([1.0, 0.0, 0.0]), shift + torch.tensor([0.0, 1e30, 0.0])
        for weights in (None, massless.new_tensor([[1.0, 0.0, 1.0, 2.0]] * 2)):
            distance = sliced_wasserstein(x, x + far, slices, seen, p=p, x_weights=weights)
            torch.testing.assert_close(distance, torch.full((2,), moved))
        inputs = draw(0, 5).requires_grad_(), draw(1, 7).requires_grad_(), (draw(2, 5).abs() + 0.1).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, y, a: wasserstein_1d(x, y, a, p=p), inputs)

    def test_masks_alone_are_coupled_once_for_all_slices(self, monkeypatch):
        seen, couple = [], sliced.couple_masses
        monkeypatch.setattr(
            sliced, "couple_masses", lambda n, m, **where: seen.append(n.shape) or couple(n, m, **where)
        )
        mask = torch.arange(11) < torch.tensor([11, 4, 1]).unsqueeze(1)
        sliced_wasserstein(draw(0, 3, 11, 4), draw(1, 14, 4), draw(2, 5, 4), x_mask=mask)
        assert seen == [(3, 1, 11)]

    @pytest.mark.parametrize(("n", "m"), [(6, 6), (9, 6), (5, 7)])
    def test_compiled_in_one_graph(self, n, m):
        torch._dynamo.reset()
        x, y = draw(0, 2, n), draw(1, m)
        assert torch._dynamo.explain(wasserstein_1d)(x, y).graph_break_count == 0

    def test_compiled_once_for_all_sizes(self):
        """Sizes are symbols then, and so is the width."""
        torch._dynamo.reset()
        compiled = torch.compile(sliced_wasserstein, dynamic=True, fullgraph=True, backend="eager")
        for n, m, width in ((6, 9, 4), (9, 6, 3), (5, 7, 5), (8, 8, 4)):
            sets = draw(0, 2, n, width), draw(1, m, width), draw(2, 3, width)
            torch.testing.assert_close(compiled(*sets), sliced_wasserstein(*sets), rtol=0, atol=1e-12)

    @settings(max_examples=80, deadline=None)
    @given(n=st.integers(1, 20), m=st.integers(1, 20), seed=st.integers(0, 10_000), p=st.sampled_from([1, 2, 3]))
    def test_against_pot(self, n, m, seed, p):
        x, y = draw(seed, n), draw(seed + 1, m)
        a, b = draw(seed + 2, n).abs() + 0.01, draw(seed + 3, m).abs() + 0.01
        for weights in ((None, None), (a, b), (a, None), (None, b)):
            as_numpy = [None if w is None else (w / w.sum()).numpy() for w in weights]
            expected = ot.emd2_1d(x.numpy(), y.numpy(), *as_numpy, metric="minkowski", p=p)
            if p > 1:
                expected = ot.wasserstein_1d(x.numpy(), y.numpy(), *as_numpy, p=p)
            assert abs(float(wasserstein_1d(x, y, *weights, p=p)) ** p - float(expected)) < 1e-9

    def test_sliced_against_pot(self):
        x, y, slices = draw(0, 11, 4), draw(1, 14, 4), unit(draw(2, 20, 4))
        expected = ot.sliced_wasserstein_distance(x.numpy(), y.numpy(), projections=slices.T.numpy())
        assert abs(float(sliced_wasserstein(x, y, slices)) - expected) < 1e-10

    def test_batches_masks_and_slice_weights(self):
        x, y, slices, share = draw(0, 3, 11, 4), draw(1, 14, 4), draw(2, 5, 4), draw(3, 5).abs()
        mask = torch.arange(11) < torch.tensor([11, 4, 1]).unsqueeze(1)
        actual = sliced_wasserstein(x, y, slices, share, x_mask=mask)
        assert actual.shape == (3,)
        for i, length in enumerate([11, 4, 1]):
            powers = [wasserstein_1d(x[i, :length] @ t, y @ t) ** 2 for t in unit(slices)]
            expected = (torch.stack(powers) * share).sum() / share.sum()
            assert abs(float(actual[i]) ** 2 - float(expected)) < 1e-10

    def test_massless_points_are_never_read(self):
        x, weights = torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([1.0, 0.0, 1.0])
        assert float(wasserstein_1d(x, torch.tensor([1.0, 2.0]), x_weights=weights)) == 0

    def test_gradient_at_zero_is_zero(self):
        x = draw(0, 5).requires_grad_()
        wasserstein_1d(x, x.detach()).backward()
        assert float(x.grad.abs().max()) == 0

    @settings(max_examples=30, deadline=None)
    @given(n=st.integers(2, 12), seed=st.integers(0, 10_000))
    def test_the_family_keeps_its_order(self, n, seed):
        """SW ≤ W₂ ≤ D for any slices."""
        x, y, slices = draw(seed, n, 2), draw(seed + 1, n, 2), draw(seed + 2, 10, 2)
        exact = np.sqrt(ot.emd2([], [], ot.dist(x.numpy(), y.numpy())))
        assert float(sliced_wasserstein(x, y, slices)) <= exact + 1e-9
        assert float(swgg(x.unsqueeze(0), y, slices).min()) >= exact - 1e-9
