"""What every relaxation and every way of computing it must stand: far references, empty batches, late gradients."""

import pytest
import torch

from cswe.ops import LapSum, SoftSort, swgg
from cswe.ops.kernels import backend, relaxed_cross_cost
from cswe.ops.kernels.problem import Problem

DOUBLE = torch.float64


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


RELAXATIONS = [None, SoftSort(0.3), SoftSort(0.3, relative=True), LapSum(0.3), LapSum(0.3, relative=True)]


@pytest.mark.parametrize("relaxation", RELAXATIONS)
def test_references_of_samples_far_apart(relaxation):
    """One reference per sample: no centre serves all of them, yet a relative unit is that of all together."""
    apart = torch.tensor([0.0, 3e3]).reshape(2, 1, 1)
    y = torch.rand(2, 40, 3, generator=torch.Generator().manual_seed(0)) + apart
    x, slices = y + torch.tensor([0.5, 0, 0]), torch.eye(3)
    expected = swgg(x.double(), y.double(), slices.double(), relaxation)
    torch.testing.assert_close(swgg(x, y, slices, relaxation).double(), expected, rtol=1e-2, atol=1e-3)
    # Where they are makes no difference to exact numbers, unless they set the unit.
    if relaxation is None or not relaxation.relative:
        near = swgg((x.double() - apart), (y.double() - apart), slices.double(), relaxation)
        torch.testing.assert_close(expected, near, rtol=0, atol=1e-9)
    else:
        unit = (x.double() @ slices.double().T).flatten(0, 1).std(0, correction=0).unsqueeze(-1)
        given = type(relaxation)(0.3, relative=True, unit=unit)
        torch.testing.assert_close(expected, swgg(x.double(), y.double(), slices.double(), given), rtol=0, atol=1e-9)


@pytest.mark.parametrize("relaxation", RELAXATIONS)
@pytest.mark.parametrize("way", ["dense", "scan", "cpu"])
class TestWays:
    @pytest.mark.parametrize("per_sample", [False, True])
    def test_an_empty_batch(self, relaxation, way, per_sample):
        shapes = [(0, 5, 3), ((0, 4, 3) if per_sample else (4, 3)), (2, 3)]
        inputs = [draw(seed, *shape).requires_grad_() for seed, shape in enumerate(shapes)]
        with backend(way):
            distance = swgg(*inputs, relaxation)
        assert distance.shape == (0, 2)
        for gradient, each in zip(torch.autograd.grad(distance.sum(), inputs), inputs, strict=True):
            assert torch.equal(gradient, torch.zeros_like(each))

    def test_the_backward_pass_goes_the_same_way_after_the_block(self, relaxation, way):
        x, y, slices = draw(0, 2, 9, 3), draw(1, 2, 7, 3), draw(2, 4, 3)
        gradients = []
        for inside in (True, False):
            inputs = [each.clone().requires_grad_() for each in (x, y, slices)]
            with backend(way):
                distance = swgg(*inputs, relaxation)
                if inside:
                    distance.sum().backward()
            if not inside:
                distance.sum().backward()
            gradients.append([each.grad for each in inputs if each.grad is not None])
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)

    def test_a_set_of_nothing_ends_no_unvalidated_run(self, relaxation, way):
        mask = torch.tensor([[True] * 5, [False] * 5])
        with backend(way):
            distance = swgg(draw(0, 2, 5, 3), draw(1, 4, 3), draw(2, 2, 3), relaxation, x_mask=mask, validate=False)
            alone = swgg(draw(0, 2, 5, 3)[:1], draw(1, 4, 3), draw(2, 2, 3), relaxation)
        if relaxation is None or not relaxation.relative:
            torch.testing.assert_close(distance[:1], alone)


def test_autocast_does_not_reach_the_gradients_of_the_scan():
    problem = Problem(
        points=draw(0, 2, 3, 40, dtype=torch.float32).sort(-1).values,
        order=draw(1, 2, 3, 40).argsort(-1),
        tokens=draw(2, 2, 40, 5, dtype=torch.float32),
        squares=draw(3, 2, 40, dtype=torch.float32),
        targets=draw(4, 3, 30, 5, dtype=torch.float32),
        centre=draw(5, 5, dtype=torch.float32),
        lengths=None,
        positions=None,
        mass=None,
        tau=0.3,
    )
    found = []
    for enabled in (False, True):
        inputs = [each.clone().requires_grad_() for each in (problem.points, problem.tokens, problem.targets)]
        again = problem._replace(points=inputs[0], tokens=inputs[1], targets=inputs[2])
        with backend("scan"), torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value = relaxed_cross_cost(again)
            found.append([value, *torch.autograd.grad(value.sum(), inputs)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("relaxation", [SoftSort(0.3), LapSum(0.3)])
def test_second_derivatives(relaxation):
    """Refused by the fast ways, with a word on which has them; and that one has them."""
    inputs = [draw(seed, *shape).requires_grad_() for seed, shape in enumerate([(2, 5, 3), (4, 3), (2, 3)])]
    (first,) = torch.autograd.grad(swgg(*inputs, relaxation).sum(), inputs[2], create_graph=True)
    with pytest.raises(NotImplementedError, match=r'no second one.*cswe.backend\("dense"\)'):
        first.sum().backward()
    with backend("dense"):
        assert torch.autograd.gradgradcheck(lambda *each: swgg(*each, relaxation), inputs)
