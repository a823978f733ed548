"""Sets of different sizes as (values, ptr) or nested tensors: the same vectors, without padding to the longest."""

import pytest
import torch

import cswe
from cswe.nn import WassersteinPool
from cswe.nn.ragged import groups

DOUBLE = torch.float64
LENGTHS = [7, 1, 40, 8, 9, 39, 2]


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ragged(seed=0, width=6):
    values = draw(seed, sum(LENGTHS), width)
    ptr = torch.tensor([0, *LENGTHS]).cumsum(0)
    padded = torch.nn.utils.rnn.pad_sequence(list(values.split(LENGTHS)), batch_first=True)
    mask = torch.arange(40) < torch.tensor(LENGTHS).unsqueeze(1)
    return values, ptr, padded, mask


POOLS = [
    lambda: cswe.SWEPool(6, 5, 9),
    lambda: cswe.SWEPool(6, 5, 9, "flatten", 2),
    lambda: cswe.SWEPool(6, 5, readout="statistics"),
    lambda: cswe.MeanPool(6),
    lambda: cswe.MaxPool(6),
    lambda: cswe.CLSPool(6),
    lambda: cswe.AttentionPool(6, queries=2),
    lambda: WassersteinPool(6, 4, iterations=5),
]


@pytest.mark.parametrize("make", POOLS)
class TestPools:
    def test_values_and_ptr(self, make):
        values, ptr, padded, mask = ragged()
        pool = make().double()
        values.requires_grad_()
        vectors = pool((values, ptr))
        torch.testing.assert_close(vectors, pool(padded, mask), rtol=0, atol=1e-12)
        (gradient,) = torch.autograd.grad(vectors.square().sum(), values)
        padded.requires_grad_()
        (expected,) = torch.autograd.grad(pool(padded, mask).square().sum(), padded)
        torch.testing.assert_close(gradient, expected[mask], rtol=0, atol=1e-10)

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_nested(self, make, layout):
        values, _, padded, mask = ragged()
        pool = make().double()
        nested = torch.nested.nested_tensor(list(values.split(LENGTHS)), layout=layout)
        torch.testing.assert_close(pool(nested), pool(padded, mask), rtol=0, atol=1e-12)

    def test_weights(self, make):
        values, ptr, padded, mask = ragged()
        weights = draw(1, len(values)).abs() + 0.1
        padded_weights = torch.zeros(mask.shape, dtype=DOUBLE)
        padded_weights[mask] = weights
        pool = make().double()
        expected = pool(padded, mask, padded_weights)
        torch.testing.assert_close(pool((values, ptr), weights=weights), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("relaxation", [None, cswe.SoftSort(0.3), cswe.LapSum(0.4), cswe.LapSum(0.4, relative=True)])
@pytest.mark.parametrize("standardize", [False, True])
def test_the_bound(relaxation, standardize):
    values, ptr, padded, mask = ragged()
    pool = cswe.SWEPool(6, 5, 9, standardize=standardize).double()
    if standardize:
        pool.init_from(padded, mask)
    bound = cswe.SWGGBound(pool, 1.0, relaxation)
    torch.testing.assert_close(bound((values, ptr)), bound(padded, mask), rtol=0, atol=1e-10)
    torch.testing.assert_close(bound.hard((values, ptr)), bound.hard(padded, mask), rtol=0, atol=1e-10)
    duals = cswe.PrimalDual(bound, lr=0.1)
    duals.lagrangian(torch.zeros(()), (values, ptr)).backward()
    duals.step()


def test_no_set_is_padded_by_more_than_a_quarter():
    values, ptr, _, _ = ragged()
    parts = list(groups((values, ptr), None))
    assert sorted(int(i) for part in parts for i in part.samples) == list(range(7))
    for part in parts:
        longest, shortest = part.mask.shape[1], int(part.mask.sum(1).min())
        assert longest <= max(1.25 * shortest, shortest + 1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((draw(0, 5, 6), torch.tensor([0, 2, 4])), "ascend from 0 to the number of tokens, 5"),
        ((draw(0, 5, 6), torch.tensor([0, 3, 3, 5])), "sample 1 has no token"),
        ((draw(0, 5, 6), torch.tensor([0.0, 5.0])), "whole numbers"),
        ((draw(0, 5, 6), [0, 5]), "whole numbers"),
        ((draw(0, 5, 6), torch.tensor([0])), "number of tokens, 5, but got one number"),
        ((draw(0, 5, 6), torch.tensor([0, 5]), 1), "a tuple of 3"),
        ((draw(0, 5, 6),), "a tuple of 1"),
        ((draw(0, 1, 5, 6), torch.tensor([0, 1])), r"shape \(T, d\) but got \(1, 5, 6\)"),
        ((draw(0, 5, 4), torch.tensor([0, 5])), r"\(B, N, 6\)"),
    ],
)
def test_errors(tokens, message):
    pool = cswe.SWEPool(6, 5, 9).double()
    for takes in (pool, cswe.SWGGBound(pool, 1.0), cswe.MinSlicedWasserstein(pool, 1.0), pool.init_from):
        with pytest.raises(ValueError, match=message):
            takes(tokens)


@pytest.mark.parametrize("make", POOLS)
def test_no_set_at_all(make):
    """A process of many may have none: as with padded tokens, there is a vector of nobody, and a gradient."""
    pool, values = make(), draw(0, 0, 6, dtype=torch.float32).requires_grad_()
    vectors = pool((values, torch.tensor([0])), weights=torch.ones(0))
    assert vectors.shape == (0, pool.out_dim)
    vectors.sum().backward()
    assert values.grad.shape == (0, 6)


def test_nested_weights_belong_to_their_sets():
    """As many in all, but of sets of other sizes: they would be dealt to the tokens of other sets."""
    tokens, weights = (
        torch.nested.nested_tensor(parts, layout=torch.jagged)
        for parts in ([draw(0, 2, 6), draw(1, 3, 6)], [draw(2, 3).abs(), draw(3, 2).abs()])
    )
    with pytest.raises(ValueError, match="nested weights of as many numbers as the sets have tokens"):
        cswe.MeanPool(6)(tokens, weights=weights)
    values, given = list(tokens.unbind()), [draw(2, 2).abs(), draw(3, 3).abs()]
    vectors = cswe.MeanPool(6)(tokens, weights=torch.nested.nested_tensor(given, layout=torch.jagged))
    for vector, points, masses in zip(vectors, values, given, strict=True):
        torch.testing.assert_close(vector, masses @ points / masses.sum())


def test_a_mask_has_no_place():
    values, ptr, _, mask = ragged()
    with pytest.raises(ValueError, match="without a mask"):
        cswe.MeanPool(6)((values, ptr), mask)
    with pytest.raises(ValueError, match=r"weights of ragged tokens of shape \(106,\)"):
        cswe.MeanPool(6)((values, ptr), weights=torch.ones(3))


def test_a_start_from_data_and_what_has_to_be_padded():
    values, ptr, padded, mask = ragged()
    pools = [cswe.SWEPool(6, 5, 9, standardize=True).double() for _ in range(2)]
    pools[0].init_from((values, ptr))
    pools[1].init_from(padded, mask)
    for one, other in zip(pools[0].state_dict().values(), pools[1].state_dict().values(), strict=True):
        if one.shape not in ((1, 6), (6, 6)):  # weightings are drawn
            torch.testing.assert_close(one, other)
    with pytest.raises(TypeError, match=r"expected tokens to be a torch\.Tensor but got tuple"):
        pools[0].explain((values, ptr))
