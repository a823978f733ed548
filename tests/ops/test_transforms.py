"""Forward-mode derivatives, vmap, grad and the like of ``torch.func``: nothing is lost silently."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

from cswe.ops import LapSum, SoftSort, l_moments, sliced_wasserstein, swe, swgg, wasserstein_1d
from cswe.ops.kernels import backend

DOUBLE = torch.float64


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Sorts of more than 1,024 numbers: that many are not left to torch.sort.
TOKENS, REFERENCE, SLICES = draw(0, 3, 40, 4), draw(1, 30, 4), draw(2, 10, 4)
OPERATIONS = {
    "swe": lambda x: swe(x, REFERENCE.to(x), SLICES.to(x)),
    "swe by rank": lambda x: swe(x, REFERENCE.to(x), SLICES.to(x), order="rank"),
    "l_moments": lambda x: l_moments((x @ SLICES.to(x).T).mT, 3),
    "wasserstein_1d": lambda x: wasserstein_1d((x @ SLICES.to(x).T).mT, (REFERENCE.to(x) @ SLICES.to(x).T).T),
    "sliced_wasserstein": lambda x: sliced_wasserstein(x, REFERENCE.to(x), SLICES.to(x)),
    "swgg": lambda x: swgg(x, REFERENCE.to(x), SLICES.to(x)),
    "swgg, SoftSort": lambda x: swgg(x, REFERENCE.to(x), SLICES.to(x), SoftSort(0.3)),
    "swgg, LapSum": lambda x: swgg(x, REFERENCE.to(x), SLICES.to(x), LapSum(0.3)),
    "SoftSort @": lambda x: SoftSort(0.3)(x[..., 0]) @ x,
    "SoftSort.T @": lambda x: SoftSort(0.3)(x[..., 0]).T @ x,
    "LapSum @": lambda x: LapSum(0.3)(x[..., 0]) @ x,
    "LapSum.T @": lambda x: LapSum(0.3)(x[..., 0]).T @ x,
}


@pytest.mark.parametrize("way", ["auto", "scan"])
@pytest.mark.parametrize("name", OPERATIONS)
class TestOperations:
    def test_forward_mode(self, name, way):
        function, tangent, step = OPERATIONS[name], draw(3, 3, 40, 4), 1e-6
        expected = (function(TOKENS + step * tangent) - function(TOKENS - step * tangent)) / (2 * step)
        single, tangent = TOKENS.float(), tangent.float()
        with backend(way):
            _, found = torch.func.jvp(function, (single,), (tangent,))
            with forward_ad.dual_level():
                too = forward_ad.unpack_dual(function(forward_ad.make_dual(single, tangent))).tangent
        for each in (found, too):
            torch.testing.assert_close(each.double(), expected, rtol=1e-4, atol=1e-4)

    def test_grad(self, name, way):
        function, inputs = OPERATIONS[name], TOKENS.clone().requires_grad_()
        with backend(way):
            (expected,) = torch.autograd.grad(function(inputs).square().sum(), inputs)
            found = torch.func.grad(lambda x: function(x).square().sum())(TOKENS)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)

    def test_vmap_and_gradients_through_it(self, name, way):
        function, many = OPERATIONS[name], draw(4, 2, 3, 40, 4)
        results = []
        with backend(way):
            for mapped in (torch.func.vmap(function), lambda x: torch.stack([function(each) for each in x])):
                inputs = many.clone().requires_grad_()
                result = mapped(inputs)
                results.append([result.detach(), *torch.autograd.grad(result.square().sum(), inputs)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("relaxation", [SoftSort(0.3), LapSum(0.3)])
class TestRelaxations:
    def test_slices_forward(self, relaxation):
        """Nothing else requires a gradient: the tangent of the slices is all there is."""
        tangent, step = draw(3, 10, 4), 1e-6
        plus, minus = (swgg(TOKENS, REFERENCE, SLICES + sign * step * tangent, relaxation) for sign in (1, -1))
        _, found = torch.func.jvp(lambda t: swgg(TOKENS, REFERENCE, t, relaxation), (SLICES,), (tangent,))
        torch.testing.assert_close(found, (plus - minus) / (2 * step), rtol=0, atol=1e-7)

    @pytest.mark.parametrize("masked", [False, True])
    def test_the_unit_is_held_forwards_too(self, relaxation, masked):
        mask = torch.arange(40) < torch.tensor([[40], [7], [1]]) if masked else None

        def distance(slices):
            return swgg(TOKENS, REFERENCE, slices, replace(relaxation, relative=True), x_mask=mask).sum(0)

        torch.testing.assert_close(
            torch.func.jacfwd(distance)(SLICES), torch.func.jacrev(distance)(SLICES), rtol=0, atol=1e-9
        )

    def test_hessian(self, relaxation):
        x, y, slices, step = draw(0, 1, 6, 4), draw(1, 5, 4), draw(2, 1, 4), 1e-5
        first = torch.func.grad(lambda t: swgg(x, y, t, relaxation).sum())
        steps = step * torch.eye(4, dtype=DOUBLE).unsqueeze(1)
        expected = torch.stack([(first(slices + each) - first(slices - each)) / (2 * step) for each in steps], -1)
        found = torch.func.hessian(lambda t: swgg(x, y, t, relaxation).sum())(slices)
        torch.testing.assert_close(found.reshape(4, 4), expected.reshape(4, 4), rtol=0, atol=1e-7)

    def test_compiled(self, relaxation):
        tangent = draw(3, 10, 4)

        def forwards(function):
            return torch.func.jvp(function, (SLICES,), (tangent,))[1]

        def distance(slices):
            return swgg(TOKENS, REFERENCE, slices, relaxation)

        expected = forwards(distance)
        torch._dynamo.reset()
        torch.testing.assert_close(forwards(torch.compile(distance, backend="eager")), expected)
        torch.testing.assert_close(torch.compile(lambda: forwards(distance), backend="eager")(), expected)
