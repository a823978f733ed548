"""What pools do by Triton kernels, against float64: readouts, tokens read as they are stored, whole pools.

:mod:`gpu_matrix` runs it, interpreted or on a GPU.
"""

import copy
import itertools
import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))  # its neighbours, also for who only collects it

from gpu_common import BRAIN, HALF, SINGLE, draw, error

from cswe.nn import SWEPool
from cswe.nn.projected import ProjectedSets
from cswe.ops.embedding import l_moments_of_sorted, quantiles_of_sorted
from cswe.ops.kernels import cuda_moments, cuda_quantiles, cuda_stored


def check_readouts(device):
    """Weighted L-moments, and quantile functions of sets of other sizes: values and gradients against plain torch."""
    worst = [0.0] * 5
    # Samples, slices, tokens, weightings, moments, reference points; masked; ties.
    cases = [
        (2, 3, 7, 2, 4, 5, False, False),
        (3, 2, 33, 1, 5, 70, True, True),
        (2, 1, 1, 2, 3, 4, False, False),
        (2, 3, 270, 2, 2, 5, False, False),  # longer than our own sort takes
    ]
    large = [
        (64, 32, 98, 2, 2, 196, False, False),
        (8, 16, 700, 4, 4, 100, True, True),
        (4, 3, 3000, 2, 8, 512, True, False),
    ]
    for batch, slices, count, heads, k, points, masked, ties in cases if device == "cpu" else [*cases, *large]:
        generator = torch.Generator().manual_seed(count)
        x = torch.randn(batch, count, slices, generator=generator).transpose(1, 2)  # as projections come
        x = (x.round() if ties else x).to(device)
        scores = torch.randn(batch, heads, count, generator=generator).to(device)
        mask, lengths = None, None
        if masked:
            mask = (torch.rand(batch, count, generator=generator) < 0.6).to(device)
            mask[:, 0] = True
            scores, lengths = scores.masked_fill(~mask[:, None], -torch.inf), mask.sum(-1)
        masses = torch.softmax(scores, -1) * 1.7  # they need not sum to one

        def differentiated(of, precision, *inputs):
            leaves = [t.detach().to(precision, copy=True).requires_grad_() for t in inputs]
            value = of(*leaves)
            weights = torch.arange(1.0, value.numel() + 1, device=value.device).reshape(value.shape) / value.numel()
            return value, *torch.autograd.grad((value * weights).sum(), leaves)

        found = differentiated(
            lambda *given, m=mask, n=k: cuda_moments.higher_moments(*given, m, n), torch.float32, x, masses
        )
        expected = differentiated(
            lambda *given, m=mask, n=k: l_moments_of_sorted(*ProjectedSets(given[0], m, given[1]).ranked(), n)[..., 1:],
            torch.float64, x, masses,
        )  # fmt: skip
        if mask is not None:
            expected[2].masked_fill_(~mask[:, None], 0)  # a masked token's mass is nobody's business
        ranked = x.sort(-1).values
        found += differentiated(lambda s, n=lengths, m=points: cuda_quantiles.averages(s, n, m), torch.float32, ranked)
        present = None if lengths is None else (torch.arange(count, device=device) < lengths[:, None])[:, None]
        expected += differentiated(lambda s, p=present, m=points: quantiles_of_sorted(s, p, m), torch.float64, ranked)
        if count > 1:  # one value has no moments but its mean
            worst = [max(w, error(f, e)) for w, f, e in zip(worst, found, expected, strict=True)]
    # By values, neighbouring J(t) are subtracted, which differ by one mass in thousands where sets are large.
    by_values = worst.pop(1)
    assert max(worst) < 2e-5, worst
    assert by_values < (2e-5 if device == "cpu" else 1e-4), by_values
    worst.insert(1, by_values)
    return " ".join(f"{e:.1e}" for e in worst)


def check_stored(device):
    """Projections of tokens as they are stored, and the gradient of the directions, of any size; and its own."""
    worst = [0.0, 0.0, 0.0]
    generator = torch.Generator().manual_seed(4)
    sizes = [(3, 21, 13, 5)] if device == "cpu" else [(3, 21, 13, 5), (64, 98, 192, 256), (9, 401, 320, 2)]
    for (batch, count, width, slices), dtype, masked, shifted in itertools.product(
        sizes, (HALF, SINGLE, BRAIN), (False, True), (False, True)
    ):
        x = (torch.randn(batch, count, width, generator=generator) + 2).to(device, dtype)
        mask = None
        if masked:
            mask = (torch.rand(batch, count, generator=generator) < 0.6).to(device)
            mask[:, 0] = True
            x = torch.where(mask.unsqueeze(-1), x, torch.nan)  # what is masked is never read
        centre, factor = (torch.full((width,), 1.9, device=device), torch.tensor(0.3, device=device))
        if not shifted:
            centre = factor = None
        theta = (30 * torch.randn(slices, width, generator=generator)).to(device).requires_grad_()
        found, squares = cuda_stored.project_stored(x, mask, centre, factor, theta)
        centred = x.double() - (0 if centre is None else centre.double())
        centred = centred if mask is None else torch.where(mask.unsqueeze(-1), centred, 0.0)
        exact = theta.detach().double().requires_grad_()
        expected = (centred @ exact.T).transpose(1, 2) * (1 if factor is None else factor.double())
        weights = torch.randn(found.shape, generator=generator).to(device).requires_grad_()
        (got,) = torch.autograd.grad((found * weights).sum(), theta, retain_graph=True)
        (wanted,) = torch.autograd.grad((expected * weights.double()).sum(), exact)
        (again,) = torch.autograd.grad((found * weights).sum(), theta, create_graph=True)
        (second,) = torch.autograd.grad(again.sum(), weights)
        summed = centred.sum(-1).unsqueeze(1).expand(second.shape) * (1 if factor is None else factor.double())
        worst = [
            max(worst[0], error(found, expected), error(squares, centred.square().sum(-1))),
            max(worst[1], error(got, wanted), error(again, wanted)),
            max(worst[2], error(second, summed)),
        ]
        if mask is not None:
            assert bool((found.detach()[~mask.unsqueeze(1).expand(found.shape)] == 0).all())
    assert max(worst) < 2e-6, worst
    return " ".join(f"{e:.1e}" for e in worst)


def check_pools_read_stored_tokens(device):
    """A pool that reads tokens as they are stored gives what one that converts them gives, and so do its gradients."""
    worst = 0.0
    generator = torch.Generator().manual_seed(5)
    kernels = mock.patch("cswe.nn.pool.gpu_kernels", return_value=cuda_stored)
    plain = mock.patch("cswe.nn.pool.gpu_kernels", return_value=None)
    for choices, dtype, masked in itertools.product(
        (
            {"readout": "moments:2", "weightings": 2, "standardize": True},
            {"readout": "statistics", "weightings": 2, "normalize_keys": True, "standardize": True},
            {"readout": "flatten", "points": 7, "order": "reference"},
        ),
        (HALF, SINGLE),
        (False, True),
    ):
        pool = SWEPool(dim=12, slices=5, **choices).to(device)
        x = (torch.randn(4, 19, 12, generator=generator) * 2 + 1).to(device, dtype)
        mask = (torch.rand(4, 19, generator=generator) < 0.6).to(device) if masked else None
        if mask is not None:
            mask[:, 0] = True
        given = torch.rand(4, 19, generator=generator).to(device) if masked else None
        pool.init_from(x.float(), mask)
        weights = torch.randn(4, pool.out_dim, generator=generator).to(device)
        results = []
        for way in (kernels, plain):
            with way:
                value = pool(x, mask, given)
            results.append(
                (value, *torch.autograd.grad((value * weights).sum(), list(pool.parameters()), allow_unused=True))
            )
        pairs = [(f, e) for f, e in zip(*results, strict=True) if e is not None]
        worst = max(worst, *(error(f, e, least=1e-3) for f, e in pairs))
    assert worst < 1e-4, worst
    return f"{worst:.1e}"


def check_pools():
    """Pools on the GPU are those on the CPU, masks and all; in deterministic mode torch has nothing to complain of."""
    worst = 0.0
    mask = draw(5, 60, seed=7) < 0.5
    mask[:, 0] = True
    for choices in (
        {"readout": "moments:3", "weightings": 2},
        {"readout": "flatten", "points": 17, "order": "reference"},
    ):
        for m in (None, mask):
            pool = SWEPool(dim=12, slices=6, **choices)
            other = copy.deepcopy(pool).double()
            pool, x = pool.cuda(), draw(5, 60, 12, seed=8)
            weights = draw(5, pool.out_dim, seed=9)
            torch.use_deterministic_algorithms(True)
            try:
                found = torch.autograd.grad((pool(x, m) * weights).sum(), list(pool.parameters()))
            finally:
                torch.use_deterministic_algorithms(False)
            value = other(x.cpu().double(), None if m is None else m.cpu())
            expected = torch.autograd.grad((value * weights.cpu()).sum(), list(other.parameters()))
            worst = max(worst, error(pool(x, m).cpu(), value), *(map(error, [f.cpu() for f in found], expected)))
    assert worst < 1e-4, worst
    return f"{worst:.1e}"
