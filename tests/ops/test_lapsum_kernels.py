"""LapSum's compiled CPU kernels against the definition, every gradient, and the choice of the way."""

import importlib
import logging

import pytest
import torch

from cswe.nn import SWEPool, SWGGBound
from cswe.ops import LapSum, swgg
from cswe.ops.kernels import backend, cpu_lapsum, cpu_lapsum_loops, cpu_tasks
from cswe.ops.kernels.lapsum import choose_lapsum, lapsum_ranks
from cswe.ops.kernels.lapsum_problem import LapSumProblem

choosing = importlib.import_module("cswe.ops.kernels.choose")

DOUBLE, SINGLE = torch.float64, torch.float32
DIFFERENTIABLE = ("points", "tokens", "targets")


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def make(n, k, d, *, ties="none", lengths=None, alpha=0.5, dtype=DOUBLE, batch=3, slices=2):
    generator = torch.Generator().manual_seed(n * k + d)
    if ties == "none":
        points = 3 * torch.randn(batch, slices, n, generator=generator, dtype=DOUBLE)
    else:
        points = torch.randint(0, 12, (batch, slices, n), generator=generator).to(DOUBLE)
        if ties == "wide":
            points[:, 0, n // 4 :] = 5.0
    keys = torch.rand(batch, slices, n, generator=generator)
    if lengths is not None:
        lengths = torch.tensor(lengths)
        keys += torch.arange(n) >= lengths.reshape(-1, 1, 1)  # the valid tokens are the first ones, in some order
    return LapSumProblem(
        points=(points / alpha).sort(-1).values.to(dtype),
        order=keys.argsort(-1),
        tokens=draw(1, batch, n, d, dtype=dtype),
        targets=draw(3, slices, k, d, dtype=dtype),
        centre=draw(4, d, dtype=dtype),
        lengths=lengths,
    )


def laplace_cdf(u):
    """With `where`: written with `abs` its slope at 0 would be 0 and not ½."""
    return torch.where(u < 0, torch.exp(u.clamp(max=0)) / 2, 1 - torch.exp(-u.clamp(min=0)) / 2)


def coupling(s, ranks):
    """The matrix (K, N), with thresholds found by bisection and differentiated as implicit functions."""
    levels = torch.arange(1, ranks, dtype=DOUBLE) / ranks
    fixed = s.detach()
    low, high = torch.full_like(levels, float(fixed.min()) - 60), torch.full_like(levels, float(fixed.max()) + 60)
    for _ in range(90):
        middle = (low + high) / 2
        too_high = laplace_cdf(middle.unsqueeze(-1) - fixed).mean(-1) > levels
        low, high = torch.where(too_high, low, middle), torch.where(too_high, middle, high)
    b = (low + high) / 2
    distance = b.unsqueeze(-1) - s
    density = (torch.exp(-distance.detach().abs()) / 2).mean(-1)
    reached = laplace_cdf(distance).mean(-1)
    b = b - torch.where(density > 0, (reached - reached.detach()) / torch.where(density > 0, density, 1.0), 0.0)
    shares = laplace_cdf(b.unsqueeze(-1) - s)
    bottom, top = torch.zeros(1, len(s), dtype=DOUBLE), torch.ones(1, len(s), dtype=DOUBLE)
    return torch.cat([bottom, shares, top]).diff(dim=0) / len(s)


def by_definition(problem, upstream):
    """Value and gradients in float64, on the very same (perhaps float32) numbers."""
    doubled = [getattr(problem, name).detach().to(DOUBLE).requires_grad_() for name in DIFFERENTIABLE]
    points, tokens, targets = doubled
    batch, slices, count = points.shape
    value = []
    for i in range(batch):
        n = count if problem.lengths is None else int(problem.lengths[i])
        for l in range(slices):
            rows = (tokens[i] - problem.centre.to(DOUBLE))[problem.order[i, l, :n]]
            value.append(((coupling(points[i, l, :n], targets.shape[1]) @ rows) * targets[l]).sum())
    value = torch.stack(value).reshape(batch, slices)
    return value.detach(), torch.autograd.grad(value, doubled, upstream.to(DOUBLE))


def assert_agrees(problem, values=1e-10, gradients=1e-9):
    upstream = draw(5, *problem.points.shape[:2], dtype=problem.points.dtype)
    expected, expected_gradients = by_definition(problem, upstream)
    value, slope = cpu_lapsum.value_and_slope(problem, with_slope=True)
    alone, nothing = cpu_lapsum.value_and_slope(problem, with_slope=False)
    assert nothing.shape == (problem.points.shape[0], 0, 0)
    # Everything is a sum of terms of the size |T| |v|: where those cancel, rounding is all there is.
    rows = float(problem.targets.to(DOUBLE).norm(dim=-1).mean() * problem.tokens.to(DOUBLE).norm(dim=-1).mean())
    for actual in (value, alone):
        assert actual.dtype == problem.points.dtype
        assert float((actual - expected).norm()) <= values * max(float(expected.norm()), rows)
    tokens, targets = cpu_lapsum.tokens_gradient(problem, upstream), cpu_lapsum.targets_gradient(problem, upstream)
    actuals = (slope * upstream.unsqueeze(-1), tokens, targets)
    for actual, gradient, floor in zip(actuals, expected_gradients, (rows * float(upstream.norm()), 0, 0), strict=True):
        assert actual.dtype == problem.points.dtype
        assert float((actual - gradient).norm()) <= gradients * float(gradient.norm()) + 1e-3 * gradients * floor


SIZES = [(1, 1, 3), (1, 9, 3), (9, 1, 16), (40, 40, 33), (80, 45, 5), (33, 70, 17), (7, 21, 64), (64, 98, 1)]
ALPHAS = [1e-3, 0.1, 1.0, 10.0, 100.0]
COARSE = {"dtype": SINGLE}, {"values": 1e-5, "gradients": 1e-3}


class TestAgainstTheDefinition:
    @pytest.mark.parametrize("alpha", ALPHAS)
    @pytest.mark.parametrize(("n", "k", "d"), SIZES)
    def test_sizes_and_temperatures(self, n, k, d, alpha):
        assert_agrees(make(n, k, d, alpha=alpha))
        assert_agrees(make(n, k, d, alpha=alpha, **COARSE[0]), **COARSE[1])

    @pytest.mark.parametrize("ties", ["some", "wide"])
    @pytest.mark.parametrize("alpha", ALPHAS)
    @pytest.mark.parametrize(("n", "k", "d"), [(40, 40, 33), (81, 45, 5), (2, 3, 4)])
    def test_ties(self, n, k, d, alpha, ties):
        assert_agrees(make(n, k, d, ties=ties, alpha=alpha))
        assert_agrees(make(n, k, d, ties=ties, alpha=alpha, **COARSE[0]), **COARSE[1])

    def test_thresholds_that_lie_on_points(self):
        """Symmetric points: the middle threshold is the middle point, where the kernel has its kink."""
        problem = make(5, 2, 3, batch=1, slices=1)
        points = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0], dtype=DOUBLE).reshape(1, 1, 5)
        assert_agrees(problem._replace(points=points))
        assert_agrees(problem._replace(points=torch.zeros_like(points)))

    @pytest.mark.parametrize("ties", ["none", "some"])
    @pytest.mark.parametrize(("n", "k"), [(40, 40), (80, 45), (33, 70)])
    def test_lengths(self, n, k, ties):
        for lengths in ([n, n // 2, 1], [3, n, 3], [n, n, n]):
            problem = make(n, k, 7, ties=ties, lengths=lengths)
            assert_agrees(problem)
            # Behind a sample's length nothing is read: not the points, not the tokens.
            beyond = torch.arange(n) >= problem.lengths.unsqueeze(-1)
            spoilt = problem._replace(
                points=problem.points.masked_fill(beyond.unsqueeze(-2), torch.nan),
                tokens=problem.tokens.masked_fill(beyond.unsqueeze(-1), torch.nan),
            )
            value, slope = cpu_lapsum.value_and_slope(problem, with_slope=True)
            again, slope_again = cpu_lapsum.value_and_slope(spoilt, with_slope=True)
            assert torch.equal(value, again)
            assert torch.equal(slope, slope_again)
            assert bool((slope.masked_select(beyond.unsqueeze(-2)) == 0).all())
            upstream = draw(5, 3, 2)
            expected, actual = (cpu_lapsum.targets_gradient(each, upstream) for each in (problem, spoilt))
            assert torch.equal(expected, actual)
            at_tokens = cpu_lapsum.tokens_gradient(spoilt, upstream)
            assert bool((at_tokens.masked_select(beyond.unsqueeze(-1)) == 0).all())

    @pytest.mark.parametrize("blocks", [1, 50, 1 << 22])
    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("lengths", [None, [20, 3, 20, 11, 3]])
    def test_blocks_and_threads_change_nothing(self, lengths, blocks, threads, monkeypatch):
        problem = make(20, 15, 6, lengths=lengths, batch=5, slices=4)
        problem = problem._replace(tokens=problem.tokens.float())  # what is converted is converted by block
        upstream = draw(5, 5, 4)

        def everything():
            gradients = cpu_lapsum.targets_gradient(problem, upstream), cpu_lapsum.tokens_gradient(problem, upstream)
            return *gradients, *cpu_lapsum.value_and_slope(problem, with_slope=True)

        expected = everything()
        monkeypatch.setattr(cpu_tasks, "BLOCK_ELEMENTS", blocks)
        monkeypatch.setattr(cpu_tasks, "TASK_ELEMENTS", 10)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            actual = everything()
        finally:
            torch.set_num_threads(before)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_tokens(self, dtype):
        problem = make(21, 21, 9, dtype=SINGLE)
        assert_agrees(problem._replace(tokens=problem.tokens.to(dtype)), **COARSE[1])

    def test_non_contiguous_inputs(self):
        problem = make(21, 13, 9)
        turned = problem._replace(
            points=problem.points.mT.contiguous().mT,
            order=problem.order.mT.contiguous().mT,
            tokens=problem.tokens.mT.contiguous().mT,
            targets=problem.targets.mT.contiguous().mT,
            centre=torch.stack([problem.centre, problem.centre], -1)[:, 0],
        )
        assert not any(tensor.is_contiguous() for tensor in turned[:5])
        assert_agrees(turned)

    @pytest.mark.parametrize("alpha", [1e-3, 0.1])
    def test_many_points_in_float32(self, alpha):
        """Thresholds in float32 would break the masses of the ranks by 1e-3 at this size."""
        problem = make(2048, 2048, 4, alpha=alpha, dtype=SINGLE, batch=1, slices=1)
        assert_agrees(problem, **COARSE[1])
        ones = problem._replace(tokens=torch.ones(1, 2048, 4), centre=torch.zeros(4))
        shares = cpu_lapsum.targets_gradient(ones, torch.full((1, 1), 2048.0))
        assert float((shares - 1).abs().max()) < 1e-5

    @pytest.mark.parametrize("gap", [2.0, 70.0, 600.0])
    def test_two_points_in_closed_form(self, gap):
        """Share ½ e^(−gap/2) of each goes over; in float64 its derivative is right to the digit, however small."""
        problem = make(2, 2, 3, batch=1, slices=1)
        problem = problem._replace(points=torch.tensor([[[0.0, gap]]], dtype=DOUBLE), order=torch.tensor([[[0, 1]]]))
        (v, w), (first, second) = problem.tokens[0], problem.targets[0]
        slope = torch.exp(torch.tensor(-gap / 2, dtype=DOUBLE)) / 8 * torch.dot(w - v, first - second)
        _, actual = cpu_lapsum.value_and_slope(problem, with_slope=True)
        torch.testing.assert_close(actual[0, 0], torch.stack([slope, -slope]), rtol=1e-12, atol=0)

    def test_far_points(self):
        """Two clusters whose distance underflows, as many ranks in each and then not, and one point very far away."""
        for k in (40, 39, 8):
            for dtype, tolerances in ((DOUBLE, {}), (SINGLE, COARSE[1])):
                problem = make(40, k, 8, alpha=0.5, dtype=dtype)
                points = problem.points.clone()
                points[..., 20:] += 1600
                points[..., 39:] += 1e5
                assert_agrees(problem._replace(points=points), **tolerances)


def gradients_of(name, inputs, wanted, **kwargs):
    inputs = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    with backend(name):
        distance = swgg(*inputs, **kwargs)
    return distance.detach(), torch.autograd.grad(distance.square().sum(), [inputs[i] for i in wanted])


def assert_same(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-10)
    for a, b in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


class TestThroughTheFrontDoor:
    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)])
    @pytest.mark.parametrize("masked", [False, True])
    def test_only_the_gradients_asked_for(self, wanted, masked):
        inputs = draw(0, 4, 19, 5), draw(1, 12, 5), draw(2, 3, 5)
        mask = torch.rand(4, 19, generator=torch.Generator().manual_seed(3)) < 0.6 if masked else None
        kwargs = {"relaxation": LapSum(0.3), "x_mask": mask}
        expected = gradients_of("scan", inputs, wanted, **kwargs)
        for name in ("cpu", "auto"):
            assert_same(gradients_of(name, inputs, wanted, **kwargs), expected)

    @pytest.mark.parametrize("relative", [False, True])
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("kind", ["one reference", "one each", "masked", "masked each"])
    def test_references(self, kind, tied, relative):
        x, y, slices = draw(0, 4, 9, 5), draw(1, *((4,) if "each" in kind else ()), 12, 5), draw(2, 3, 5)
        if tied:
            x, y, slices = x.round(), y.round(), torch.eye(5, dtype=DOUBLE)
        y_mask = torch.rand(y.shape[:-1], generator=torch.Generator().manual_seed(5)) < 0.6 if "mask" in kind else None
        kwargs = {"relaxation": LapSum(0.3, relative), "y_mask": y_mask}
        inputs = x, y, slices
        expected = gradients_of("scan", inputs, (0, 1, 2), **kwargs)
        assert_same(gradients_of("cpu", inputs, (0, 1, 2), **kwargs), expected)

    @pytest.mark.parametrize("name", ["scan", "cpu"])
    def test_a_masked_reference_is_a_smaller_one(self, name):
        x, y, slices = draw(0, 3, 9, 5), draw(1, 3, 12, 5), draw(2, 4, 5)
        mask = torch.rand(3, 12, generator=torch.Generator().manual_seed(5)) < 0.6
        with backend(name):
            padded = swgg(x, y, slices, LapSum(0.3), y_mask=mask)
            shared = swgg(x, y[0], slices, LapSum(0.3), y_mask=mask[0])
            for i in range(3):
                alone = swgg(x[i : i + 1], y[i, mask[i]], slices, LapSum(0.3))
                torch.testing.assert_close(padded[i : i + 1], alone, rtol=0, atol=1e-10)
            torch.testing.assert_close(shared, swgg(x, y[0, mask[0]], slices, LapSum(0.3)), rtol=0, atol=1e-10)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_tokens(self, dtype):
        x, y, slices = draw(0, 4, 19, 5, dtype=SINGLE).to(dtype), draw(1, 12, 5, dtype=SINGLE), draw(2, 3, 5)
        slices = slices.float()
        expected = gradients_of("scan", (x.float(), y, slices), (0, 1, 2), relaxation=LapSum(0.3))
        value, gradients = gradients_of("cpu", (x, y, slices), (0, 1, 2), relaxation=LapSum(0.3))
        assert gradients[0].dtype == dtype
        torch.testing.assert_close(value, expected[0])
        torch.testing.assert_close(gradients[0].float(), expected[1][0], rtol=2e-2, atol=2e-3)
        for a, b in zip(gradients[1:], expected[1][1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)

    def test_no_gradient_at_all(self):
        inputs = draw(0, 4, 19, 5), draw(1, 12, 5), draw(2, 3, 5)
        expected, _ = gradients_of("scan", inputs, (0,), relaxation=LapSum(0.3))
        with torch.no_grad():
            torch.testing.assert_close(swgg(*inputs, LapSum(0.3)), expected)

    def test_a_second_derivative_is_refused(self):
        for wanted in range(3):
            inputs = [draw(0, 2, 9, 3), draw(1, 7, 3), draw(2, 2, 3)]
            inputs[wanted].requires_grad_()
            with backend("cpu"):
                distance = swgg(*inputs, LapSum(0.3))
            (first,) = torch.autograd.grad(distance.sum(), inputs[wanted], create_graph=True)
            with pytest.raises(NotImplementedError, match="no second one"):
                first.sum().backward()

    def test_sorted_rows(self):
        points, order = draw(0, 3, 11).sort(-1)
        points.requires_grad_()
        rows = draw(1, 11, 4).requires_grad_()
        ranked = lapsum_ranks(points, order, rows)
        unsorted = points.new_zeros(3, 11).scatter(-1, order, points)
        expected = LapSum(1.0)(unsorted).dense() @ rows
        torch.testing.assert_close(ranked, expected)
        upstream = draw(2, 3, 11, 4)
        for a, b in zip(
            torch.autograd.grad(ranked, (points, rows), upstream),
            torch.autograd.grad(expected, (points, rows), upstream),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def tensors_of(problem, requires_grad):
    return [
        None if value is None else value.clone().requires_grad_(requires_grad and name in DIFFERENTIABLE)
        for name, value in problem._asdict().items()
    ]


class TestAsOperators:
    @pytest.mark.parametrize("lengths", [None, [9, 2, 5]])
    def test_opcheck(self, lengths):
        problem = make(9, 7, 4, lengths=lengths)
        for with_slope in (True, False):
            arguments = tensors_of(problem, requires_grad=with_slope)
            torch.library.opcheck(torch.ops.cswe.lapsum_cross.default, (*arguments, with_slope))
        arguments = (draw(5, 3, 2), *tensors_of(problem, requires_grad=False))
        torch.library.opcheck(torch.ops.cswe.lapsum_cross_targets.default, arguments)
        torch.library.opcheck(torch.ops.cswe.lapsum_cross_tokens.default, arguments)

    def test_opcheck_of_ranks(self):
        points, order = draw(0, 3, 11).sort(-1)
        arguments = (points.requires_grad_(), order, draw(1, 11, 4).requires_grad_())
        torch.library.opcheck(torch.ops.cswe.lapsum_ranks.default, arguments)

    @pytest.mark.parametrize("name", ["scan", "cpu"])
    def test_compiled_in_one_graph(self, name):
        def total(x, y, slices, mask):
            return swgg(x, y, slices, LapSum(0.3), x_mask=mask).sum()

        inputs = [draw(0, 3, 9, 4), draw(1, 7, 4).requires_grad_(), draw(2, 2, 4).requires_grad_()]
        torch._dynamo.reset()
        with backend(name):
            compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
            for mask in (None, torch.arange(9) < torch.tensor([[9], [4], [1]])):
                expected = torch.autograd.grad(total(*inputs, mask), inputs[1:])
                for a, b in zip(torch.autograd.grad(compiled(*inputs, mask), inputs[1:]), expected, strict=True):
                    torch.testing.assert_close(a, b)


@pytest.fixture
def compiled_calls(monkeypatch):
    """Count how often the compiled way is taken."""
    calls, original = [], cpu_lapsum.value_and_slope

    def counted(problem, with_slope):
        calls.append(with_slope)
        return original(problem, with_slope)

    monkeypatch.setattr(cpu_lapsum, "value_and_slope", counted)
    return calls


class TestChoice:
    INPUTS = draw(0, 2, 9, 3), draw(1, 9, 3), draw(2, 2, 3)

    def test_the_compiled_way_wherever_it_applies(self, compiled_calls, monkeypatch):
        monkeypatch.delenv("CSWE_BACKEND", raising=False)
        swgg(*self.INPUTS, LapSum(0.3))
        pool = SWEPool(dim=3, slices=2, points=9).double()
        SWGGBound(pool, bound=1.0, relaxation=LapSum(0.3))(self.INPUTS[0])
        assert compiled_calls == [False, True]

    def test_by_hand(self, compiled_calls, monkeypatch):
        for name in ("scan", "dense"):
            with backend(name):
                swgg(*self.INPUTS, LapSum(0.3))
        monkeypatch.setenv("CSWE_BACKEND", "scan")
        swgg(*self.INPUTS, LapSum(0.3))
        assert compiled_calls == []
        with backend("cpu"):
            swgg(*self.INPUTS, LapSum(0.3))
        assert compiled_calls == [False]

    @pytest.mark.parametrize("side", ["x_weights", "y_weights"])
    def test_weights_are_served_by_plain_torch(self, compiled_calls, side):
        weights = {side: draw(3, *((2, 9) if side == "x_weights" else (9,))).abs()}
        with backend("scan"):
            expected = swgg(*self.INPUTS, LapSum(0.3), **weights)
        with backend("cpu"):
            torch.testing.assert_close(swgg(*self.INPUTS, LapSum(0.3), **weights), expected)
        assert compiled_calls == []

    def test_other_devices(self, monkeypatch):
        monkeypatch.delenv("CSWE_BACKEND", raising=False)
        cuda = torch.device("cuda")
        assert choose_lapsum(cuda, is_uniform=True) == "scan"
        with backend("cpu"), pytest.raises(ValueError, match="'cpu' was asked for, but the tensors are on cuda"):
            choose_lapsum(cuda, is_uniform=True)
        with backend("cuda"), pytest.raises(ValueError, match="'cuda' was asked for, but the tensors are on cpu"):
            swgg(*self.INPUTS, LapSum(0.3))

    def test_without_numba_plain_torch_serves_and_says_so_once(self, compiled_calls, monkeypatch, caplog):
        for function in (choosing._missing, choosing._say_if_missing):
            function.cache_clear()
        try:
            with monkeypatch.context() as without:
                without.setattr(choosing.importlib.util, "find_spec", lambda name: None)
                without.delenv("CSWE_BACKEND", raising=False)
                with caplog.at_level(logging.INFO, logger="cswe"):
                    for _ in range(3):
                        swgg(*self.INPUTS, LapSum(0.3))
        finally:
            for function in (choosing._missing, choosing._say_if_missing):
                function.cache_clear()
        assert compiled_calls == []
        assert len(caplog.records) == 1


def test_few_specialisations():
    """One for float32 and one for float64: contiguity, read-only memory and dtypes must not multiply them."""
    for dtype in (SINGLE, DOUBLE):
        assert_agrees(make(5, 5, 3, dtype=dtype), **COARSE[1])
    for loop in (cpu_lapsum_loops.fused, cpu_lapsum_loops.sums_at_ranks, cpu_lapsum_loops.sums_at_tokens):
        assert len(loop.signatures) <= 2
