"""What comes in at a pool's door: wrong arguments, weights, odd sizes, and sets of nothing."""

import numpy as np
import pytest
import torch

import cswe
from cswe.nn import MapPoints, MeanPool, PMAPool, SWEPool, WassersteinPool

DOUBLE = torch.float64


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SWEPool(0, 5), "dim ≥ 1 but got 0"),
        (lambda: SWEPool(6, 0), "slices ≥ 1 but got 0"),
        (lambda: SWEPool(6, 5, 0), "points ≥ 1 or None but got 0"),
        (lambda: SWEPool(6, 5, readout="flatten"), "give points=M"),
        (lambda: SWEPool(6, 5, readout="map-points"), "give the pool points=M"),
        (lambda: SWEPool(6, 5, 9, readout=MapPoints(8)), "made for 8 points but the pool has 9"),
        (lambda: SWEPool(6, 5, readout="moments:x"), "'moments:K', .* but got 'moments:x'"),
        (lambda: SWEPool(6, 5, readout="moments:0"), "k ≥ 1 moments but got 0"),
        (lambda: SWEPool(6, 5, readout="moments:1:3"), "k ≥ 2 moments with means"),
        (lambda: SWEPool(6, 5, readout="moments:2:0"), "means ≥ 1 slices, or None for all, but got 0"),
        (lambda: SWEPool(6, 5, readout="moments:2:6"), "at most the pool's 5 slices but got 6"),
        (lambda: SWEPool(6, 5, readout="statistics:6"), "at most the pool's 5 slices but got 6"),
        (lambda: SWEPool(6, 5, readout="moments:2:3:4"), "'moments:K:MEANS', .* but got 'moments:2:3:4'"),
        (lambda: SWEPool(6, 5, readout="statistics:x"), "'statistics:MEANS', .* but got 'statistics:x'"),
        (lambda: SWEPool(6, 5, order="up"), "one of reference, rank, argsort but got 'up'"),
        (lambda: SWEPool(6, 5, init="zero"), "'orthogonal' or 'normal' but got 'zero'"),
        (lambda: SWEPool(6, 5, weightings=-1), "weightings ≥ 0 but got -1"),
        (lambda: SWEPool(6, 5, 9, "flatten", 2, interpolation="linear"), "takes no weights"),
        (lambda: cswe.AttentionPool(6, queries=0), "queries ≥ 1 but got 0"),
        (lambda: cswe.AttentionPool(6, values=0), "values ≥ 1 but got 0"),
        (lambda: SWEPool(6, 5, readout="moments:²"), "'moments:K', .* but got 'moments:²'"),
        (lambda: cswe.SWGGBound(SWEPool(6, 5), 1.0), "the pool has none: give it points=M"),
        (lambda: cswe.SWGGBound(SWEPool(6, 5, 9), 1.0, wrt="reference"), "'both' or 'slices'"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda n: SWEPool(n, 5), lambda n: SWEPool(6, n), lambda n: SWEPool(6, 5, n)])
def test_numbers_that_are_whole(make):
    assert make(np.int64(7)).out_dim == make(7).out_dim
    for wrong in (8.0, "8", True, torch.tensor(8)):
        with pytest.raises(TypeError, match="a whole number, but got"):
            make(wrong)


@pytest.mark.parametrize("make", [MeanPool, lambda d: SWEPool(d, 5), lambda d: SWEPool(d, 5, 4, "flatten")])
def test_weights_under_the_mask_are_not_read(make):
    pool, tokens, mask = make(6), draw(0, 3, 7, 6), torch.arange(7) < torch.tensor([[7], [4], [1]])
    weights = draw(1, 3, 7).abs()
    hidden = torch.where(mask, weights, torch.nan)
    assert torch.equal(pool(tokens, mask, hidden), pool(tokens, mask, weights))
    with pytest.raises(ValueError, match="weights has 9 NaN or infinite values"):
        pool(tokens, None, hidden)
    with pytest.raises(ValueError, match="the mask and the weights together leave no mass in sample 2"):
        pool(tokens, mask, weights * (torch.arange(7) > 0))


@pytest.mark.parametrize("weights", [torch.full((1, 7), 1e38), torch.full((1, 7), 1e-50, dtype=DOUBLE)])
def test_weights_that_cannot_be_summed_are_refused(weights):
    with pytest.raises(ValueError, match=r"too small or too large for sums in torch\.float32"):
        MeanPool(6)(draw(0, 1, 7, 6), None, weights)


def test_a_deviation_far_from_the_origin():
    tokens = 1000 + 0.5 * draw(0, 1, 200, 1)
    pool = SWEPool(1, 1, readout="statistics")
    exact = tokens.double().std(unbiased=False)
    assert float(pool(tokens).detach()[0, 1] / exact) == pytest.approx(1.0, rel=1e-4)
    (slope,) = torch.autograd.grad(pool(tokens.requires_grad_())[0, 1], tokens)
    assert slope.any()
    for weightings in (0, 1):
        pool = SWEPool(1, 1, readout="statistics", weightings=weightings)
        for number in (50, 500, 2000):
            same = torch.full((8, number, 1), 1000.1, requires_grad=True)
            deviation = pool(same, torch.arange(number) < torch.arange(1, 9).unsqueeze(1) * number // 8)[:, 1]
            assert not deviation.any()
            assert not torch.autograd.grad(deviation.sum(), same)[0].any()


@pytest.mark.parametrize(
    "call",
    [
        MeanPool(6),
        SWEPool(6, 5),
        SWEPool(6, 5).init_from,
        cswe.SWGGBound(SWEPool(6, 5, 4), 1.0),
        cswe.SWGGBound(SWEPool(6, 5, 4), 1.0).hard,
        cswe.MinSlicedWasserstein(SWEPool(6, 5, 4), 1.0),
    ],
)
def test_what_is_no_tensor_is_refused(call):
    for wrong in (None, np.zeros((2, 3, 6))):
        with pytest.raises(TypeError, match=r"expected tokens to be a torch\.Tensor but got (NoneType|ndarray)"):
            call(wrong)


def test_tokens_that_are_the_reference():
    """Nothing is to be moved, and the plan is that of costs that are all the same."""
    pool = WassersteinPool(2, points=3)
    with torch.no_grad():
        pool.reference.zero_()
    tokens = torch.zeros(2, 4, 2, requires_grad=True)
    vectors = pool(tokens)
    assert not vectors.any()
    assert torch.isfinite(torch.autograd.grad(vectors.sum(), tokens)[0]).all()


@pytest.mark.parametrize("make", [PMAPool, lambda d: WassersteinPool(d, 4), MeanPool, lambda d: SWEPool(d, 5)])
def test_no_set_at_all(make):
    assert make(8)(torch.randn(0, 7, 8), torch.ones(0, 7, dtype=torch.bool)).shape[0] == 0


def test_shapes_can_be_asked_for_without_numbers():
    with torch.device("meta"):
        pool = SWEPool(6, 5)
        assert pool(torch.randn(3, 7, 6)).shape == (3, 10)


def test_the_default_device_has_no_say():
    """Scripts for a GPU set it; what is drawn and counted on the CPU must be so still."""
    values, lengths = draw(0, 12, 6), [3, 5, 4]
    ptr = torch.tensor([0, *lengths]).cumsum(0)
    nested = torch.nested.nested_tensor(list(values.split(lengths)), layout=torch.jagged)
    pool = SWEPool(6, 8, 5, "flatten", standardize=True)
    bounds = [cswe.SWGGBound(pool, [1.0] * 8), cswe.MinSlicedWasserstein(pool, 0.1)]

    def everything():
        pool.init_from((values, ptr))
        found = cswe.learn_slices(values, values + 1, lambda theta: theta.sum(), 2, 1.0, steps=2)
        duals = cswe.PrimalDual(bounds, lr=0.1, slack_lr=0.1, slack_weight=1.0)
        duals.lagrangian(pool((values, ptr)).sum(), (values, ptr)).backward()
        duals.step()
        state = duals.state_dict()
        duals.load_state_dict(state)
        return [*pool.state_dict().values(), *state.values(), found.slices, pool((values, ptr)), pool(nested)]

    expected = everything()
    with torch.device("meta"):
        again = everything()
    for one, other in zip(again, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "make", [lambda: cswe.AttentionPool(6, 2, 4), lambda: PMAPool(6, 2, 3), lambda: WassersteinPool(6, 4)]
)
def test_a_layer_in_double_precision_computes_in_it(make):
    pool, tokens = make().double(), draw(0, 3, 7, 6)
    assert torch.equal(pool(tokens), pool(tokens.double()))
