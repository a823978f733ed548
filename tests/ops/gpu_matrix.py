"""The Triton kernels against the definition in float64: `python tests/ops/gpu_matrix.py gpu` (or `interpret`).

`gpu 2/8` runs the second eighth of it: compiling takes longer than computing, and several processes share the cores.

Interpreted, the kernels run on the CPU at small sizes, in a process of their own: Triton reads the switch when it is
imported. On a GPU the same matrix runs at real sizes, with what only a GPU has: streams, devices, large tensors.
"""

import itertools
import os
import sys
from pathlib import Path
from unittest import mock

if __name__ == "__main__" and sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parent))  # its neighbours, also for who only collects it

from gpu_common import BRAIN, HALF, SINGLE, draw, error
from gpu_pools import check_pools, check_pools_read_stored_tokens, check_readouts, check_stored

from cswe.bench.meter import capture
from cswe.ops import SoftSort, swgg
from cswe.ops.kernels import (
    Problem,
    backend,
    cuda,
    cuda_cost,
    cuda_laplace,
    cuda_reference,
    cuda_small,
    cuda_sort,
    dense,
)
from cswe.ops.laplace import plain_and_signed_sums
from cswe.ops.measure import Measure, centre_of

VALUES, GRADIENTS = 1e-5, 1e-3
"""What is asked for, in norm."""

# batch, ranks, targets, dimensions, slices, τ; then what is special.
SMALL = [
    ((3, 17, 17, 19, 2, 0.1), {"dtype": HALF}),
    ((2, 35, 35, 5, 1, 1e-3), {}),
    ((2, 1, 1, 3, 1, 1.0), {}),
    ((2, 41, 41, 7, 1, 10.0), {"ties": "pairs", "dtype": BRAIN}),
    ((2, 70, 70, 4, 1, 0.1), {"ties": "wide"}),
    ((2, 40, 23, 6, 1, 0.1), {"dtype": HALF, "offset": 3.0}),
    ((2, 9, 40, 6, 1, 0.5), {}),
    ((4, 40, 23, 6, 1, 1.0), {"lengths": [30, 1, 40, 2], "ties": "pairs", "dtype": HALF}),
    ((2, 270, 270, 3, 1, 0.2), {"ties": "pairs"}),
    ((1, 6, 6, 3, 1, 0.3), {"ties": "pairs"}),
    ((2, 130, 130, 64, 1, 0.1), {"dtype": HALF}),  # large enough for T in one part
    ((9, 100, 100, 96, 1, 0.1), {"dtype": HALF}),  # two widths a piece, a turn of samples that is not full
    ((3, 150, 150, 64, 2, 0.5), {"dtype": HALF, "ties": "wide"}),
    # Ties in a pair of chunks, and over several: within a group of chunks, into the next one, over a whole one.
    ((2, 270, 270, 3, 1, 0.2), {"runs": [(1, 15), (47, 49), (62, 65), (70, 115), (120, 230)]}),
    ((3, 150, 90, 70, 1, 0.2), {"runs": [(15, 17), (50, 75), (78, 148)], "lengths": [150, 129, 66], "dtype": HALF}),
]
REAL = [
    ((1024, 196, 196, 192, 8, 0.01), {"dtype": HALF, "looked_at": 16}),
    ((64, 196, 196, 192, 8, 10.0), {"dtype": HALF, "looked_at": 16}),
    ((37, 197, 197, 191, 5, 0.1), {"dtype": BRAIN, "looked_at": 37}),
    ((16, 196, 196, 192, 8, 0.01), {}),
    ((16, 512, 512, 256, 4, 1e-3), {"dtype": HALF}),
    ((8, 100, 100, 1280, 8, 0.01), {}),
    ((8, 101, 100, 1283, 3, 1.0), {"dtype": HALF}),
    ((9, 1, 1, 33, 3, 1.0), {}),
    ((9, 1, 7, 33, 3, 1.0), {"dtype": HALF}),
    ((5, 33, 97, 67, 3, 0.1), {}),
    ((8, 196, 196, 192, 4, 0.1), {"ties": "pairs"}),
    ((8, 196, 196, 192, 4, 1.0), {"ties": "wide", "dtype": HALF}),
    ((4, 700, 700, 64, 3, 0.05), {"ties": "wide"}),
    ((4, 1500, 900, 64, 3, 0.5), {"dtype": HALF}),
    ((32, 1024, 512, 320, 4, 0.01), {"lengths": "drawn", "dtype": HALF}),
    ((32, 300, 77, 48, 4, 10.0), {"lengths": "drawn"}),
    ((12, 196, 300, 192, 4, 1e-3), {"lengths": "drawn", "ties": "pairs"}),
    ((8, 196, 196, 192, 4, 0.1), {"offset": 5.0, "dtype": HALF}),
    ((8, 196, 196, 192, 4, 0.1), {"offset": 5.0, "scale": 1e-3}),
    ((1, 196, 196, 193, 64, 0.01), {"offset": 1.0}),
    ((1, 2048, 2048, 65, 4, 0.1), {}),
    ((4, 4200, 4200, 130, 3, 0.1), {"runs": [(31, 33), (300, 700), (1000, 3100)], "dtype": HALF}),
    ((4, 2500, 700, 130, 3, 0.1), {"runs": [(31, 33), (300, 700), (1000, 2300)], "lengths": [2500, 1025, 1024, 1500]}),
]

AT_ONCE = [
    (17, 17, 19, False, False, HALF),
    (20, 13, 5, False, True, SINGLE),
    (18, 9, 6, True, True, HALF),
    (7, 30, 3, True, False, SINGLE),
    (1, 2, 4, False, False, SINGLE),
]
HALVES_AT_ONCE = [  # large enough for half precision where sets are small; the other way has cases of its own
    (16, 16, 512, False, False, HALF),
    (17, 9, 512, False, False, SINGLE),
    (16, 20, 512, True, False, HALF),
]
LARGE_AT_ONCE = [
    (128, 128, 1280, False, False, HALF),
    (127, 100, 65, False, True, SINGLE),
    (100, 128, 320, True, False, HALF),
    (196, 196, 192, False, False, HALF),
    (300, 512, 64, True, False, HALF),
    (300, 1100, 40, False, True, SINGLE),
]
"""Ranks, targets, dimensions; with a mask, with τ in units of the spread; tokens in."""


def make(shape, device, dtype=SINGLE, ties="none", runs=(), lengths=None, offset=0.0, scale=1.0, seed=0, **_):
    """State a problem as ``swgg`` would: projections, sorted; the reference in rank order, times its mass.

    ``runs`` are pairs of ranks: those from the first up to the second tie.
    """
    batch, count, targets, width, slices, tau = shape
    generator = torch.Generator().manual_seed(seed)
    x = ((torch.randn(batch, count, width, generator=generator) + offset) * scale).to(dtype)
    if ties == "pairs":
        x[:, 1::2] = x[:, 0 : (count // 2) * 2 : 2]
    if ties == "wide":
        x[:, : count // 3 + 40] = x[:, :1]
    y = (torch.randn(targets, width, generator=generator) + offset) * scale
    directions = torch.nn.functional.normalize(torch.randn(slices, width, generator=generator), dim=-1)
    if lengths == "drawn":
        lengths = torch.randint(1, count + 1, (batch,), generator=generator)
    elif lengths is not None:
        lengths = torch.tensor(lengths)
    x, y, directions = x.to(device), y.to(device), directions.to(device)
    centre = centre_of(Measure(y, None, False, None))
    centred = x.float() - centre
    points = (centred @ directions.T).transpose(1, 2) / scale
    if lengths is not None:
        lengths = lengths.to(device)
        mask = (torch.arange(count, device=device) < lengths[:, None]).unsqueeze(1)
        points = points.masked_fill(~mask, 1e30)
    points, order = torch.sort(points, dim=-1, stable=True)
    for first, end in runs:
        points[..., first:end] = points[..., first, None]
    if lengths is not None:
        points = torch.where(mask, points, points.gather(-1, (lengths - 1).reshape(-1, 1, 1).expand(-1, slices, 1)))
    ranked = (y - centre)[((y - centre) @ directions.T).argsort(0).T] / targets
    squares = centred.square().sum(-1)
    return Problem(points.contiguous(), order, x, squares, ranked.contiguous(), centre, lengths, None, None, tau)


def by_definition(problem, grad):
    """Value, slope of the sum, and gradients of ``Σ grad · S``, in float64, a few samples at a time."""
    values, slopes, tokens, squares, targets = [], [], [], [], 0
    for start in range(problem.points.shape[0]):
        part = problem.samples(start, start + 1)
        names = ("points", "tokens", "squares", "targets")
        doubled = {name: getattr(part, name).double().requires_grad_() for name in names}
        value = dense.value(part._replace(**doubled, centre=part.centre.double()))
        slope = torch.autograd.grad(value.sum(), doubled["points"], retain_graph=True)[0]
        slopes.append(slope * part.present())
        _, at_tokens, at_squares, at_targets = torch.autograd.grad(
            (value * grad[start : start + 1]).sum(), list(doubled.values())
        )
        values.append(value.detach())
        tokens.append(at_tokens)
        squares.append(at_squares)
        targets = targets + at_targets
    return torch.cat(values), torch.cat(slopes), targets, torch.cat(tokens), torch.cat(squares)


def check_kernels(shape, special, device):
    problem = make(shape, device, **special)
    looked_at = special.get("looked_at", problem.points.shape[0])
    generator = torch.Generator().manual_seed(1)
    grad = (torch.rand(problem.points.shape[:2], generator=generator) + 0.5).to(device)
    grad[looked_at:] = 0
    part = problem.samples(0, looked_at)
    expected = by_definition(part, grad[:looked_at])
    value, slope = cuda.value_and_slope(problem, True)
    alone, nothing = cuda.value_and_slope(problem, False)
    assert error(alone, value) < 1e-6
    assert nothing.shape == (problem.points.shape[0], 0, 0)
    targets = cuda.targets_gradient(problem, grad)
    tokens, squares = cuda.tokens_gradient(problem, grad)
    if problem.lengths is not None:
        assert bool((slope[(problem.present() == 0).expand(slope.shape)] == 0).all())
    found = (value[:looked_at], slope[:looked_at], targets, tokens[:looked_at], squares[:looked_at])
    limits = (VALUES, GRADIENTS, GRADIENTS, GRADIENTS, GRADIENTS)
    # Targets add up to zero: a sample of one rank meets nothing but rounding.
    least = (0.0, 0.0, 0.0, 1e-3 * float(problem.targets.norm()), 0.0)
    errors = [error(*triple) for triple in zip(found, expected, least, strict=True)]
    if problem.points.shape[2] == 1:  # a single point: its slope is 0 by definition
        assert bool((slope == 0).all())
    return errors, all(e <= limit for e, limit in zip(errors, limits, strict=True))


def check_parts(device):
    """Sorting and the Laplace sums, which the kernels' neighbours use."""
    generator = torch.Generator().manual_seed(2)
    small = device == "cpu"
    values = torch.randn(2, 21 if small else 196, 3, generator=generator).to(device).transpose(1, 2)
    values[0, 0, 5] = values[0, 0, 9]
    values[0, 1, 3], values[0, 1, 2] = 0.0, -0.0
    values.requires_grad_()
    ordered, order = cuda_sort.sort_rows(values)
    expected, expected_order = torch.sort(values, dim=-1, stable=True)
    assert torch.equal(ordered, expected)
    assert torch.equal(order, expected_order)
    weight = torch.arange(ordered.numel(), device=device).reshape(ordered.shape).float()
    found = torch.autograd.grad((ordered * weight).sum(), values)[0]
    assert torch.equal(found, torch.autograd.grad((expected * weight).sum(), values)[0])
    worst = 0.0
    for count, width in [(17, 3), (1, 2)] if small else [(17, 3), (300, 130), (1, 2), (1000, 1)]:
        points = torch.randint(0, 9, (2, count), generator=generator).float().sort(-1).values.to(device)
        rows = torch.randn(2, count, width, generator=generator).to(device)
        expected = plain_and_signed_sums(points.double(), rows.double(), 0.7)
        for f, e in zip(cuda_laplace.plain_and_signed_sums(points, rows, 0.7), expected, strict=True):
            worst = max(worst, error(f, e))
    assert worst < 1e-5, worst
    return worst


def check_at_once(device):
    """The whole of D in one step, as eager use on a GPU takes it: with masks over what must not be read, units of τ."""
    worst = [0.0] * 4
    cases = AT_ONCE if device == "cpu" else [*AT_ONCE, *LARGE_AT_ONCE]
    # Small sets; larger ones; and those with a reference so large that its pairs are not written down.
    ways = (cuda_small.MOST, cuda_reference.MOST_POINTS), (0, cuda_reference.MOST_POINTS), (0, 0)
    every_way, one_way = itertools.product(cases, ways), itertools.product(HALVES_AT_ONCE, ways[:1])
    for (count, targets, width, masked, relative, dtype), (most, points) in itertools.chain(every_way, one_way):
        generator = torch.Generator().manual_seed(count)
        x = (torch.randn(3, count, width, generator=generator) + 1).to(device, dtype)
        tied = [0, count // 2, count - 1] if count > 2 and not masked else [0]
        x[:, tied] = x[:, :1].clone()
        y = (torch.randn(targets, width, generator=generator) + 1).to(device)
        slices = torch.randn(2, width, generator=generator).to(device)
        mask = None
        if masked:
            mask = (torch.rand(3, count, generator=generator) < 0.7).to(device)
            mask[:, 0] = True
            x[~mask] = torch.nan

        def differentiated(of, precision, *inputs):
            leaves = [t.detach().to(precision or t.dtype).clone().requires_grad_() for t in inputs]
            value = of(*leaves)
            weights = torch.arange(1.0, value.numel() + 1, device=value.device).reshape(value.shape)
            return value, *torch.autograd.grad((value * weights).sum(), leaves)

        with mock.patch.object(cuda_small, "MOST", most), mock.patch.object(cuda_reference, "MOST_POINTS", points):
            found = differentiated(
                lambda *given, m=mask, r=relative: cuda_cost.distance(*given, m, 0.3, None, r), None, x, y, slices
            )
        with backend("dense"):
            expected = differentiated(
                lambda *given, m=mask, r=relative: swgg(*given, SoftSort(0.3, relative=r), x_mask=m),
                torch.float64, x, y, slices,
            )  # fmt: skip
        assert mask is None or bool((found[1][~mask] == 0).all())
        if most:
            other_way = found[1].clone()
        assert error(found[1], other_way) < GRADIENTS
        for grad in (found[1], expected[1]):
            # In float64 products of equal rows need not be equal, so the share of each is anything; that of all is not.
            grad[:, tied] = grad[:, tied].mean(1, keepdim=True)
        # A single token has a slope of 0, but for rounding.
        worst = [max(w, error(f, e, 1e-3)) for w, f, e in zip(worst, found, expected, strict=True)]
    assert worst[0] < VALUES, worst
    assert max(worst[1:]) < GRADIENTS, worst
    return " ".join(f"{e:.1e}" for e in worst)


def whole_path(x, y, slices, mask=None, way="cuda"):
    """D and the gradients of its sum."""
    kinds = (lambda t: t.double()) if way == "dense" else (lambda t: t)
    leaves = [kinds(t.detach().clone()).requires_grad_() for t in (x, y, slices)]
    with backend(way):
        value = swgg(*leaves, SoftSort(0.1), x_mask=mask)
    return value, torch.autograd.grad(value.sum(), leaves)


def inputs():
    mask = draw(6, 50, seed=3) < 0.7
    mask[:, 0] = True
    return (draw(6, 50, 40).half(), draw(45, 40, seed=1), draw(7, 40, seed=2)), mask


def check_whole_path():
    leaves, mask = inputs()
    worst = []
    for m in (None, mask):
        value, grads = whole_path(*leaves, m)
        expected, expected_grads = whole_path(*leaves, m, "dense")
        errors = [error(value, expected)] + [error(g, e) for g, e in zip(grads, expected_grads, strict=True)]
        assert errors[0] < VALUES, errors
        assert max(errors[1:]) < GRADIENTS, errors
        worst.append(max(errors))
    return f"{max(worst):.1e}"


def check_strides():
    leaves, mask = inputs()
    strided = [torch.stack([t, t], -1)[..., 0] for t in leaves]
    assert not strided[0].is_contiguous()
    value, grads = whole_path(*leaves, mask)
    again, grads_again = whole_path(*strided, mask)
    assert error(again, value) < 1e-6
    assert error(grads_again[2], grads[2]) < 1e-4


def check_missing_gradients():
    leaves, _ = inputs()
    _, grads = whole_path(*leaves)
    for wanted in ((), (1,), (2,), (0, 1)):
        some = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(leaves)]
        value = swgg(*some, SoftSort(0.1))
        assert value.requires_grad == bool(wanted)
        if wanted:
            for i, g in zip(wanted, torch.autograd.grad(value.sum(), [some[i] for i in wanted]), strict=True):
                assert error(g, grads[i]) < 1e-3


def check_stream():
    (x, y, slices), _ = inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # work on the wrong stream would not wait for this
        late = x.clone().mul_(2)
        value, _ = whole_path(late, y, slices)
    torch.cuda.current_stream().wait_stream(stream)
    assert error(value, whole_path(late, y, slices)[0]) < 1e-6


def check_deterministic():
    leaves, mask = inputs()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = whole_path(*leaves, mask), whole_path(*leaves, mask)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first[0], second[0])
    for a, b in zip(first[1], second[1], strict=True):
        assert torch.equal(a, b)


def check_operator():
    problem = make((3, 37, 37, 20, 2, 0.1), "cuda")
    leaves = {name: getattr(problem, name).requires_grad_() for name in ("points", "tokens", "squares", "targets")}
    torch.library.opcheck(torch.ops.cswe.relaxed_cross.default, (*problem._replace(**leaves), True, "cuda"))


def check_large():
    many = draw(64, 1024, 256).half().repeat(160, 1, 1)
    assert many.numel() > 2**31
    y, slices = draw(1024, 256, seed=1), draw(1, 256, seed=2)
    with torch.no_grad():
        value = swgg(many, y, slices, SoftSort(0.1))
        assert error(value[-64:], swgg(many[-64:].clone(), y, slices, SoftSort(0.1))) < 1e-6


def check_captured():
    """A step captured in a CUDA graph and replayed on other tokens gives what a step outside of it gives."""
    for count, masked in [(40, False), (40, True), (196, False), (700, True)]:
        x, y, slices = draw(3, count, 64), draw(count, 64, seed=1), draw(4, 64, seed=2)
        y.requires_grad_(), slices.requires_grad_()
        mask = None if not masked else torch.arange(count, device="cuda") < torch.tensor([[count], [7], [25]]).cuda()

        def step(x=x, y=y, slices=slices, mask=mask):
            y.grad = slices.grad = None
            value = swgg(x, y, slices, SoftSort(0.1), x_mask=mask, validate=False)
            value.sum().backward()
            return value.detach(), y.grad, slices.grad

        replay = capture(step)
        x.copy_(draw(3, count, 64, seed=3))
        found = replay()
        found = [tensor.clone() for tensor in found]
        assert all(torch.equal(f, e) for f, e in zip(found, step(), strict=True)), (count, masked)


ON_GPU = [
    check_captured,
    check_whole_path,
    check_strides,
    check_missing_gradients,
    check_stream,
    check_deterministic,
    check_pools,
    check_operator,
    check_large,
]


def main():
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    if device == "cpu":
        # Small tiles, and several of them: carries are tested too, and the interpreter is quicker.
        cuda.tuning = cuda.Tuning(scan_rows=0, chunk=16, tie_chunks=4)
    number, parts = (int(n) for n in sys.argv[2].split("/")) if len(sys.argv) > 2 else (1, 1)
    failed, worst = 0, [0.0] * 5
    for shape, special in (SMALL if device == "cpu" else REAL)[number - 1 :: parts]:
        errors, passed = check_kernels(shape, special, device)
        failed += not passed
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
        print("ok  " if passed else "FAIL", shape, special, " ".join(f"{e:.1e}" for e in errors), flush=True)
    if number == 1:
        print(f"sorting and Laplace sums: {check_parts(device):.1e}", flush=True)
        print(f"moments, by values, by masses, quantiles, by values: {check_readouts(device)}", flush=True)
        print(f"stored tokens, projections, gradient of directions, its own: {check_stored(device)}", flush=True)
        print(f"pools that read stored tokens: {check_pools_read_stored_tokens(device)}", flush=True)
    if number == parts:
        print(f"D in one step, and gradients by tokens, reference, slices: {check_at_once(device)}", flush=True)
    for check in ON_GPU[number - 1 :: parts] if device == "cuda" else []:
        try:
            print("ok  ", check.__name__, check() or "", flush=True)
        except Exception as met:
            failed += 1
            print("FAIL", check.__name__, type(met).__name__, str(met)[:500], flush=True)
    print(f"{failed} failed; largest errors (value, slope, targets, tokens, squares):", *(f"{e:.1e}" for e in worst))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
