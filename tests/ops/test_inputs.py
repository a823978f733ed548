"""Wrong input gets an error that names the argument, what was expected and what came."""

import pytest
import torch

from cswe.ops import SoftSort, l_moments, lifted_plan, rank_coupling, sliced_wasserstein, swe, swgg, wasserstein_1d

TOKENS, REFERENCE, SLICES = torch.randn(2, 5, 3), torch.randn(4, 3), torch.randn(6, 3)
EMPTY_SECOND = torch.tensor([[True] * 5, [False] * 5])


def broken(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: swe([1.0], REFERENCE, SLICES), TypeError, "tokens to be a torch.Tensor but got list"),
        (
            lambda: wasserstein_1d(TOKENS[:, :, 0], REFERENCE.T),
            ValueError,
            r"batch axes that broadcast but got \(2, 5\) and \(3, 4\)",
        ),
        (
            lambda: swe(TOKENS.long(), REFERENCE, SLICES),
            TypeError,
            "tokens of a floating-point dtype but got torch.int64",
        ),
        (lambda: swe(TOKENS[0], REFERENCE, SLICES), ValueError, r"tokens of shape \(B, N, d\) but got \(5, 3\)"),
        (lambda: swe(TOKENS, REFERENCE[:, :2], SLICES), ValueError, r"reference of shape \(N, 3\) but got \(4, 2\)"),
        (lambda: swe(TOKENS, REFERENCE, SLICES[:, :2]), ValueError, r"slices of shape \(L, 3\) but got \(6, 2\)"),
        (lambda: swe(TOKENS[:, :0], REFERENCE, SLICES), ValueError, "at least one point"),
        (
            lambda: swe(TOKENS, REFERENCE, SLICES, mask=EMPTY_SECOND),
            ValueError,
            "sample 1 without a single valid token",
        ),
        (
            lambda: swe(TOKENS, REFERENCE, SLICES, mask=EMPTY_SECOND[:1]),
            ValueError,
            r"mask of shape \(2, 5\) but got \(1, 5\)",
        ),
        (lambda: swe(TOKENS, REFERENCE, SLICES, mask=torch.full((2, 5), 2)), ValueError, "only 0 and 1"),
        (lambda: swe(broken(TOKENS, torch.nan), REFERENCE, SLICES), ValueError, "tokens has 1 NaN or infinite value"),
        (lambda: swe(broken(TOKENS, torch.inf), REFERENCE, SLICES), ValueError, "remove or mask them"),
        (lambda: swe(TOKENS, REFERENCE, 0 * SLICES), ValueError, "slice 0 is zero"),
        (lambda: swe(TOKENS, REFERENCE, SLICES, weights=-torch.ones(2, 5)), ValueError, "weights has negative values"),
        (lambda: swe(TOKENS, REFERENCE, SLICES, weights=torch.zeros(2, 5)), ValueError, "all zero for sample 0"),
        (
            lambda: swe(TOKENS, REFERENCE, SLICES, interpolation="cubic"),
            ValueError,
            "'barycentric' or 'linear' but got 'cubic'",
        ),
        (
            lambda: swe(TOKENS, REFERENCE, SLICES, order="up"),
            ValueError,
            "one of reference, rank, argsort but got 'up'",
        ),
        (
            lambda: swe(TOKENS, REFERENCE, SLICES, weights=torch.ones(2, 5), interpolation="linear"),
            ValueError,
            "takes no weights",
        ),
        (
            lambda: swe(TOKENS, REFERENCE, SLICES, mask=torch.eye(2, 5), weights=1 - torch.eye(2, 5)),
            ValueError,
            "leave no mass in sample 0",
        ),
        (
            lambda: swgg(TOKENS, REFERENCE[None], SLICES),
            ValueError,
            r"y of shape \(M, 3\) or \(2, M, 3\) but got \(1, 4, 3\)",
        ),
        (lambda: swgg(TOKENS, REFERENCE, SLICES, relaxation=0.1), TypeError, "None, SoftSort or LapSum but got float"),
        (lambda: swgg(broken(TOKENS, torch.nan), REFERENCE, SLICES), ValueError, "x has 1 NaN"),
        (
            lambda: swgg(TOKENS, REFERENCE, SLICES, SoftSort(1.0), x_weights=torch.ones(2, 5, requires_grad=True)),
            ValueError,
            "no gradient to weights",
        ),
        (lambda: lifted_plan(TOKENS, REFERENCE, SLICES), ValueError, r"x of shape \(N, d\) but got \(2, 5, 3\)"),
        (lambda: wasserstein_1d(torch.ones(3), torch.ones(0)), ValueError, "y of shape"),
        (lambda: wasserstein_1d(torch.ones(3), torch.ones(3), p=0.5), ValueError, "p ≥ 1 but got 0.5"),
        (
            lambda: sliced_wasserstein(TOKENS, TOKENS[:1], SLICES),
            ValueError,
            "as many samples in x as in y but got 2 and 1",
        ),
        (lambda: rank_coupling(0, 3), ValueError, "n ≥ 1 ranks but got 0"),
        (lambda: rank_coupling(torch.tensor([1.0, -1.0]), 3), ValueError, "negative"),
        (lambda: rank_coupling(2.0, 3), TypeError, "n ≥ 1 ranks, a whole number, but got 2.0"),
        (lambda: rank_coupling(torch.tensor(2.0), 3), ValueError, r"n to be a number or of shape .* but got \(\)"),
        (lambda: l_moments(torch.ones(3), 0), ValueError, "k ≥ 1"),
        (lambda: l_moments(torch.ones(3), 2.0), TypeError, "k ≥ 1 moments, a whole number, but got 2.0"),
        (lambda: l_moments(torch.ones(3), 2, mask=[1, 1, 0]), TypeError, "mask to be a torch.Tensor but got list"),
        (
            lambda: l_moments(torch.ones(3), 2, weights=[1, 1, 0]),
            TypeError,
            "weights to be a torch.Tensor but got list",
        ),
        (lambda: swe(TOKENS, REFERENCE, [[1.0, 0, 0]]), TypeError, "slices to be a torch.Tensor but got list"),
        (lambda: swgg(TOKENS, REFERENCE, SLICES.numpy()), TypeError, "slices to be a torch.Tensor but got ndarray"),
        (lambda: sliced_wasserstein(TOKENS, TOKENS, None), TypeError, "slices to be a torch.Tensor but got NoneType"),
        (lambda: lifted_plan(TOKENS[0], REFERENCE, [1.0, 0, 0]), TypeError, "theta to be a torch.Tensor but got list"),
        (
            lambda: lifted_plan(TOKENS[0], REFERENCE, torch.ones(2)),
            ValueError,
            r"theta of shape \(3,\) or \(L, 3\) but got \(2,\)",
        ),
        (
            lambda: l_moments(torch.ones(3), 4, estimator="unbiased"),
            ValueError,
            "at least k = 4 values but a set has 3",
        ),
        (
            lambda: l_moments(torch.ones(3), 2, mask=torch.ones(4)),
            ValueError,
            r"broadcastable .* \(3,\) but got \(4,\)",
        ),
    ],
)
def test_message(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_validation_can_be_switched_off():
    result = swe(broken(TOKENS, torch.nan), REFERENCE, SLICES, validate=False)
    assert bool(torch.isnan(result).any())


def test_finite_values_whose_sum_overflows_float32_are_accepted():
    swe(torch.full((1, 4, 1), 1e38), torch.zeros(4, 1), torch.ones(1, 1))


def test_a_count_may_be_a_symbol_of_torch_compile():
    moments = torch.compile(l_moments, fullgraph=True, backend="eager")
    for k in (3, 4, 5):
        assert moments(torch.arange(7.0), k).shape == (k,)
