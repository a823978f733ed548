"""The compiled CPU kernels against the definition, every gradient, and the choice between the ways."""

import importlib
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch

from cswe.ops import SoftSort, swgg
from cswe.ops.kernels import backend, cpu, cpu_loops, cpu_steps, cpu_tasks, dense, relaxed_ranks, scan
from cswe.ops.kernels.problem import Problem

choosing = importlib.import_module("cswe.ops.kernels.choose")  # its function choose hides it

DOUBLE, SINGLE = torch.float64, torch.float32
DIFFERENTIABLE = ("points", "tokens", "squares", "targets")


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def make(n, m, d, *, ties="none", lengths=None, tau=0.5, dtype=DOUBLE, batch=3, slices=2):
    generator = torch.Generator().manual_seed(n * m + d)
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
    return Problem(
        points=points.sort(-1).values.to(dtype),
        order=keys.argsort(-1),
        tokens=draw(1, batch, n, d, dtype=dtype),
        squares=draw(2, batch, n, dtype=dtype),
        targets=draw(3, slices, m, d, dtype=dtype) / m,
        centre=draw(4, d, dtype=dtype),
        lengths=lengths,
        positions=None,
        mass=None,
        tau=tau,
    )


def by_definition(problem, upstream):
    """Value and gradients of the dense form in float64, on the very same (perhaps float32) numbers."""
    doubled = {name: getattr(problem, name).detach().to(DOUBLE).requires_grad_() for name in DIFFERENTIABLE}
    value = dense.value(problem._replace(**doubled, centre=problem.centre.to(DOUBLE)))
    return value.detach(), torch.autograd.grad(value, list(doubled.values()), upstream.to(DOUBLE))


def assert_agrees(problem, values=1e-12, gradients=1e-10):
    upstream = draw(5, *problem.points.shape[:2], dtype=problem.points.dtype)
    expected, expected_gradients = by_definition(problem, upstream)
    value, slope = cpu.value_and_slope(problem, with_slope=True)
    alone, nothing = cpu.value_and_slope(problem, with_slope=False)
    assert nothing.shape == (problem.points.shape[0], 0, 0)
    for actual in (value, alone):
        assert actual.dtype == problem.points.dtype
        assert float((actual - expected).norm()) <= values * float(expected.norm())
    tokens, squares = cpu.tokens_gradient(problem, upstream)
    targets = cpu.targets_gradient(problem, upstream)
    actuals = (slope * upstream.unsqueeze(-1), tokens, squares, targets)
    # Slopes are differences of terms of the size |upstream| |T| |v| / τ: where those cancel, rounding is all there is.
    rows = problem.targets.norm(dim=-1).mean() * problem.tokens.to(DOUBLE).norm(dim=-1).mean()
    floors = [float(rows * upstream.norm()) / problem.tau, 0, 0, 0]
    for actual, gradient, floor in zip(actuals, expected_gradients, floors, strict=True):
        assert actual.dtype == problem.points.dtype
        error = float((actual - gradient).norm())
        assert error <= gradients * float(gradient.norm()) + 1e-4 * gradients * floor


SIZES = [(1, 1, 3), (1, 9, 3), (9, 1, 16), (40, 40, 33), (80, 45, 5), (33, 70, 17), (7, 21, 64), (64, 196, 1)]


class TestAgainstTheDefinition:
    @pytest.mark.parametrize("tau", [1e-3, 0.1, 1.0, 10.0])
    @pytest.mark.parametrize(("n", "m", "d"), SIZES)
    def test_sizes_and_temperatures(self, n, m, d, tau):
        assert_agrees(make(n, m, d, tau=tau))
        assert_agrees(make(n, m, d, tau=tau, dtype=SINGLE), values=1e-5, gradients=1e-3)

    @pytest.mark.parametrize("ties", ["some", "wide"])
    @pytest.mark.parametrize("tau", [1e-3, 0.7, 10.0])
    @pytest.mark.parametrize(("n", "m", "d"), [(40, 40, 33), (81, 45, 5), (2, 3, 4)])
    def test_ties(self, n, m, d, tau, ties):
        assert_agrees(make(n, m, d, ties=ties, tau=tau))
        assert_agrees(make(n, m, d, ties=ties, tau=tau, dtype=SINGLE), values=1e-5, gradients=1e-3)

    @pytest.mark.parametrize("ties", ["none", "some"])
    @pytest.mark.parametrize(("n", "m"), [(40, 40), (80, 45), (33, 70)])
    def test_lengths(self, n, m, ties):
        for lengths in ([n, n // 2, 1], [3, n, 3], [n, n, n]):
            problem = make(n, m, 7, ties=ties, lengths=lengths)
            assert_agrees(problem)
            # Behind a sample's length nothing is read: not the points, not the order, not the tokens.
            beyond = problem.present() == 0
            spoilt = problem._replace(points=problem.points.masked_fill(beyond, torch.nan))
            value, slope = cpu.value_and_slope(problem, with_slope=True)
            again, slope_again = cpu.value_and_slope(spoilt, with_slope=True)
            assert torch.equal(value, again)
            assert torch.equal(slope, slope_again)
            assert bool((slope.masked_select(beyond) == 0).all())

    @pytest.mark.parametrize("blocks", [1, 50, 1 << 22])
    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("lengths", [None, [20, 3, 20, 11, 3]])
    def test_blocks_and_threads_change_nothing(self, lengths, blocks, threads, monkeypatch):
        problem = make(20, 20, 6, lengths=lengths, batch=5, slices=4)
        problem = problem._replace(tokens=problem.tokens.float())  # what is converted is converted by block
        upstream = draw(5, 5, 4)
        expected = cpu.targets_gradient(problem, upstream), *cpu.tokens_gradient(problem, upstream)
        values = cpu.value_and_slope(problem, with_slope=True)
        monkeypatch.setattr(cpu_tasks, "BLOCK_ELEMENTS", blocks)
        monkeypatch.setattr(cpu_tasks, "TASK_ELEMENTS", 10)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            actual = cpu.targets_gradient(problem, upstream), *cpu.tokens_gradient(problem, upstream)
            again = cpu.value_and_slope(problem, with_slope=True)
        finally:
            torch.set_num_threads(before)
        for a, b in zip((*actual, *again), (*expected, *values), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_tokens(self, dtype):
        problem = make(21, 21, 9, dtype=SINGLE)
        half = problem._replace(tokens=problem.tokens.to(dtype))
        assert_agrees(half, values=1e-5, gradients=1e-3)

    def test_non_contiguous_inputs(self):
        problem = make(21, 13, 9)
        turned = problem._replace(
            points=problem.points.mT.contiguous().mT,
            order=problem.order.mT.contiguous().mT,
            tokens=problem.tokens.mT.contiguous().mT,
            squares=problem.squares.T.contiguous().T,
            targets=problem.targets.mT.contiguous().mT,
            centre=torch.stack([problem.centre, problem.centre], -1)[:, 0],
        )
        assert not any(tensor.is_contiguous() for tensor in turned[:6])
        assert_agrees(turned)

    def test_long_and_sharp_float32(self):
        """Thousands of ranks, decays from 1 to far below the smallest number that is kept."""
        problem = make(3000, 3000, 4, tau=1e-3, dtype=SINGLE, batch=1, slices=1)
        assert_agrees(problem, values=1e-5, gradients=1e-3)

    def test_far_points_make_no_denormals(self):
        """Two clusters whose distance underflows, and rows that are zero nearly everywhere."""
        problem = make(40, 40, 8, dtype=SINGLE, tau=0.05)
        points = problem.points.clone()
        points[..., 20:] += 100
        tokens = problem.tokens.clone()
        tokens[:, 1:] = problem.centre
        assert_agrees(problem._replace(points=points, tokens=tokens), values=1e-5, gradients=1e-3)


def gradients_of(name, inputs, wanted, **kwargs):
    inputs = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    with backend(name):
        distance = swgg(*inputs, **kwargs)
    return distance.detach(), torch.autograd.grad(distance.square().sum(), [inputs[i] for i in wanted])


class TestThroughTheFrontDoor:
    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)])
    @pytest.mark.parametrize("masked", [False, True])
    def test_only_the_gradients_asked_for(self, wanted, masked):
        inputs = draw(0, 4, 19, 5), draw(1, 12, 5), draw(2, 3, 5)
        mask = torch.rand(4, 19, generator=torch.Generator().manual_seed(3)) < 0.6 if masked else None
        kwargs = {"relaxation": SoftSort(0.3), "x_mask": mask}
        expected = gradients_of("dense", inputs, wanted, **kwargs)
        for name in ("cpu", "scan", "auto"):
            value, gradients = gradients_of(name, inputs, wanted, **kwargs)
            torch.testing.assert_close(value, expected[0], rtol=0, atol=1e-11)
            for a, b in zip(gradients, expected[1], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)

    def test_no_gradient_at_all(self):
        inputs = draw(0, 4, 19, 5), draw(1, 12, 5), draw(2, 3, 5)
        expected, _ = gradients_of("dense", inputs, (0,), relaxation=SoftSort(0.3))
        with torch.no_grad():
            torch.testing.assert_close(swgg(*inputs, SoftSort(0.3)), expected)

    @pytest.mark.parametrize("name", ["dense", "scan", "cpu"])
    def test_softly_sorted_rows(self, name):
        points, order = draw(0, 3, 11).sort(-1)
        points.requires_grad_()
        rows = draw(1, 11, 4).requires_grad_()
        with backend(name):
            ranked = relaxed_ranks(points, order, rows, 0.3)
        unsorted = points.new_zeros(3, 11).scatter(-1, order, points)
        expected = SoftSort(0.3)(unsorted).dense() @ rows
        torch.testing.assert_close(ranked, expected)
        upstream = draw(2, 3, 11, 4)
        for a, b in zip(
            torch.autograd.grad(ranked, (points, rows), upstream),
            torch.autograd.grad(expected, (points, rows), upstream),
            strict=True,
        ):
            torch.testing.assert_close(a, b)

    def test_weights_are_served_by_the_scan(self):
        inputs, weights = (draw(0, 2, 9, 3), draw(1, 9, 3), draw(2, 2, 3)), draw(3, 2, 9).abs()
        with backend("scan"):
            expected = swgg(*inputs, SoftSort(0.3), x_weights=weights)
        with backend("cpu"):
            torch.testing.assert_close(swgg(*inputs, SoftSort(0.3), x_weights=weights), expected)


def tensors_of(problem, requires_grad):
    return [
        value.clone().requires_grad_(requires_grad and name in DIFFERENTIABLE)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in problem._asdict().items()
    ]


@pytest.mark.parametrize("name", ["scan", "cpu"])
class TestAsOperators:
    @pytest.mark.parametrize("lengths", [None, [9, 2, 5]])
    def test_opcheck(self, name, lengths):
        problem = make(9, 7, 4, lengths=lengths)
        for with_slope in (True, False):
            arguments = tensors_of(problem, requires_grad=with_slope)
            torch.library.opcheck(torch.ops.cswe.relaxed_cross.default, (*arguments, with_slope, name))
        arguments = (draw(5, 3, 2), *tensors_of(problem, requires_grad=False), name)
        torch.library.opcheck(torch.ops.cswe.relaxed_cross_targets.default, arguments)
        torch.library.opcheck(torch.ops.cswe.relaxed_cross_tokens.default, arguments)

    def test_opcheck_of_ranks(self, name):
        points, order = draw(0, 3, 11).sort(-1)
        arguments = (points.requires_grad_(), order, draw(1, 11, 4).requires_grad_(), 0.3, name)
        torch.library.opcheck(torch.ops.cswe.relaxed_ranks.default, arguments)

    def test_compiled_in_one_graph(self, name):
        def total(x, y, slices, mask):
            return swgg(x, y, slices, SoftSort(0.3), x_mask=mask).sum()

        inputs = [draw(0, 3, 9, 4), draw(1, 7, 4).requires_grad_(), draw(2, 2, 4).requires_grad_()]
        torch._dynamo.reset()
        with backend(name):
            compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
            for mask in (None, torch.arange(9) < torch.tensor([[9], [4], [1]])):
                expected = torch.autograd.grad(total(*inputs, mask), inputs[1:])
                for a, b in zip(torch.autograd.grad(compiled(*inputs, mask), inputs[1:]), expected, strict=True):
                    torch.testing.assert_close(a, b)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU, g++ is missing")
def test_compiled_to_machine_code():
    def total(x, y, slices):
        return swgg(x, y, slices, SoftSort(0.3)).sum()

    inputs = [draw(0, 3, 9, 4), draw(1, 7, 4).requires_grad_(), draw(2, 2, 4).requires_grad_()]
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(total, fullgraph=True)(*inputs), inputs[1:])
    for a, b in zip(found, torch.autograd.grad(total(*inputs), inputs[1:]), strict=True):
        torch.testing.assert_close(a, b)


BITS = """
import hashlib
import torch
from cswe.ops import LapSum, SoftSort, swgg
draw = torch.Generator().manual_seed(0)
x, y, slices = (torch.randn(shape, generator=draw) for shape in ((8, 100, 33), (37, 33), (5, 33)))
x[:, 1::7] = x[:, ::7]  # ties
inputs = [tensor.requires_grad_() for tensor in (x, y, slices)]
for relaxation in (SoftSort(0.5), LapSum(0.5)):
    distances = swgg(*inputs, relaxation)
    for tensor in (distances, *torch.autograd.grad(distances.sum(), inputs)):
        print(hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest())
"""


def test_the_same_bits_in_the_process_that_compiles_and_in_the_next(tmp_path):
    """Else a run that was broken off in the former would not go on in the latter as if nothing had been."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    told = []
    for _ in range(2):
        found = subprocess.run(
            [sys.executable, "-c", BITS], capture_output=True, text=True, check=True, env=environment
        )
        told.append(found.stdout.splitlines())
        assert list(tmp_path.rglob("*.nbc"))  # or the next would compile again
    assert len(told[0]) == 8
    assert told[0] == told[1]


@pytest.fixture
def forgetful(monkeypatch):
    """What is missing is looked up once a process: look again in this test, and forget it afterwards."""
    for function in (choosing._missing, choosing._say_if_missing):
        function.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for function in (choosing._missing, choosing._say_if_missing):
        function.cache_clear()


class TestChoice:
    def test_the_best_way_there_is(self, monkeypatch):
        choose = choosing.choose
        monkeypatch.delenv("CSWE_BACKEND", raising=False)
        assert choose(make(3, 3, 2)) == "cpu"
        assert choose(make(3, 3, 2)._replace(mass=torch.ones(3, 2, 3))) == "scan"

    def test_by_hand(self, monkeypatch):
        choose, problem = choosing.choose, make(3, 3, 2)
        monkeypatch.setenv("CSWE_BACKEND", "dense")
        assert choose(problem) == "dense"
        with backend("scan"):
            assert choose(problem) == "scan"
            with backend("auto"):
                assert choose(problem) == "cpu"
        assert choose(problem) == "dense"

    def test_wrong_names(self, monkeypatch):
        with (
            pytest.raises(ValueError, match=r"expected backend to be one of 'dense', .* but got 'numba'"),
            backend("numba"),
        ):
            pass
        monkeypatch.setenv("CSWE_BACKEND", "gpu")
        with pytest.raises(ValueError, match=r"expected CSWE_BACKEND to be one of .* but got 'gpu'"):
            choosing.choose(make(3, 3, 2))
        with pytest.raises(ValueError, match="'cuda' was asked for, but the tensors are on cpu"), backend("cuda"):
            choosing.choose(make(3, 3, 2))

    def test_without_numba_the_scan_serves_and_says_so_once(self, forgetful, caplog):
        forgetful.setattr(choosing.importlib.util, "find_spec", lambda name: None)
        forgetful.delenv("CSWE_BACKEND", raising=False)
        with caplog.at_level(logging.INFO, logger="cswe"):
            for _ in range(3):
                assert choosing.choose(make(3, 3, 2)) == "scan"
        assert [record.message for record in caplog.records] == [
            "relaxed SWGG runs in plain torch (the backend 'scan'): numba is not installed (pip install 'cswe[fast]')"
        ]
        with backend("cpu"), pytest.raises(ValueError, match="'cpu' was asked for, but numba is not installed"):
            choosing.choose(make(3, 3, 2))

    def test_nothing_is_compiled_before_it_is_needed(self):
        code = "import sys, cswe, cswe.ops.kernels; assert 'numba' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)


def test_loops_compile_without_a_place_for_the_cache(monkeypatch):
    """A read-only installation of a user without a home: numba refuses to cache, not to compile."""

    def refuse(function, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return ("compiled", function)

    monkeypatch.setattr(cpu_steps, "_compile", refuse)
    assert cpu_steps.compiled(len) == ("compiled", len)


def test_few_specialisations():
    """One for float32 and one for float64: contiguity, read-only memory and dtypes must not multiply them."""
    for dtype in (SINGLE, DOUBLE):
        assert_agrees(make(5, 5, 3, dtype=dtype), values=1e-5, gradients=1e-3)
    for loop in (cpu_loops.fused, cpu_loops.sums_at_ranks, cpu_loops.sums_at_tokens):
        assert len(loop.signatures) <= 2


def test_scan_and_cpu_share_one_signature():
    for module in (scan, cpu):
        assert all(
            callable(getattr(module, name)) for name in ("value_and_slope", "targets_gradient", "tokens_gradient")
        )
