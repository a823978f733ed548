"""Contributions of tokens: exact, complete, blind to padding."""

import pytest
import torch

from cswe import AttentionPool, MaxPool, MeanPool, SWEPool
from cswe.nn import explain_slices, explain_tokens
from cswe.ops import rank_coupling

READOUTS = ["moments:1", "moments:4", "moments:3:2", "statistics", "statistics:2", "flatten", "map-points"]


def sets(batch=3, count=9, dim=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(batch, count, dim, generator=generator, dtype=torch.float64) + 3
    mask = torch.arange(count) < torch.tensor([count, 5, 1]).unsqueeze(1)
    weights = torch.rand(batch, count, generator=generator, dtype=torch.float64) + 0.1
    return tokens, mask, weights


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("order", ["rank", "reference"])
@pytest.mark.parametrize("weightings", [0, 2])
def test_contributions_sum_to_the_target(readout, order, weightings):
    tokens, mask, weights = sets()
    pool = SWEPool(4, 5, 6, readout, weightings, order).double()
    target = torch.randn(pool.out_dim, dtype=torch.float64)
    for chosen_mask, chosen_weights in ((None, None), (mask, None), (mask, weights)):
        vector = pool(tokens, chosen_mask, chosen_weights)
        shares = pool.explain(tokens, chosen_mask, chosen_weights, target)
        assert shares.shape == (3, 5, 9)
        torch.testing.assert_close(shares.sum((1, 2)), vector @ target)
        squared = pool.explain(tokens, chosen_mask, chosen_weights)
        torch.testing.assert_close(squared.sum((1, 2)), vector.square().sum(1))
        if chosen_mask is not None:
            assert (shares[~mask.unsqueeze(1).expand_as(shares)] == 0).all()


def test_linear_interpolation_and_standardisation():
    tokens, mask, _ = sets()
    pool = SWEPool(4, 5, 6, "flatten", standardize=True, interpolation="linear").double()
    pool.init_from(tokens, mask)
    shares = pool.explain(tokens, mask)
    torch.testing.assert_close(shares.sum((1, 2)), pool(tokens, mask).square().sum(1))


def test_flat_readout_gives_squared_displacements():
    tokens = sets()[0][:, :6]
    pool = SWEPool(4, 5, 6, "flatten").double()
    values = (tokens @ pool.slicer.directions().T).transpose(1, 2)
    reference = (pool.slicer.directions() @ pool.reference.T).sort(-1).values
    rank = values.argsort(-1).argsort(-1)
    expected = (values - reference.expand(3, 5, 6).gather(-1, rank)).square()
    torch.testing.assert_close(pool.explain(tokens), expected.detach())


def test_a_token_that_meets_several_reference_points_is_split_among_them():
    tokens = sets()[0][:1, :3]
    pool = SWEPool(4, 1, 6, "flatten").double()
    values, order = (tokens @ pool.slicer.directions().T)[0, :, 0].sort()
    reference = (pool.slicer.directions() @ pool.reference.T)[0].sort().values
    plan = rank_coupling(3, 6).dense().double() * 6
    z = pool(tokens)[0]
    expected = (plan * z * (values.unsqueeze(1) - reference)).sum(1)
    torch.testing.assert_close(pool.explain(tokens)[0, 0, order], expected.detach())


def test_shape_does_not_depend_on_the_origin():
    tokens, mask, _ = sets()
    pool = SWEPool(4, 5, readout="moments:3").double()
    target = torch.ones(5, 3, dtype=torch.float64)
    target[:, 0] = 0  # spread and skewness only
    here, there = (pool.explain(tokens + shift, mask, target=target.flatten()) for shift in (0, 100))
    torch.testing.assert_close(here, there)


def test_a_far_token_stands_out():
    tokens = torch.zeros(1, 8, 4) + 0.01 * torch.randn(1, 8, 4)
    tokens[0, 3] += 10
    shares = SWEPool(4, 6, readout="moments:2").explain(tokens).sum(1)
    assert shares[0].argmax() == 3
    assert shares[0, 3] > 0.9 * shares.sum()


@pytest.mark.parametrize("kind", [MeanPool, MaxPool])
def test_other_pools(kind):
    tokens, mask, _ = sets()
    shares = explain_tokens(kind(4), tokens, mask)
    torch.testing.assert_close(shares.sum(1), kind(4)(tokens, mask).square().sum(1))


def test_attention_and_sums_over_slices():
    tokens, mask, _ = sets()
    assert explain_tokens(AttentionPool(4, 2).double(), tokens, mask).shape == (3, 9)
    pool = SWEPool(4, 5).double()
    torch.testing.assert_close(explain_tokens(pool, tokens, mask), pool.explain(tokens, mask).sum(1))


def test_gradients_are_left_alone_and_a_wrong_target_is_refused():
    tokens = sets()[0].float().requires_grad_()
    pool = SWEPool(4, 5)
    with torch.no_grad():
        shares = pool.explain(tokens)
    assert not shares.requires_grad
    assert tokens.grad is None
    assert pool.slicer.weight.grad is None
    with pytest.raises(ValueError, match=r"expected target of shape \(10,\) or \(3, 10\) but got \(7,\)"):
        pool.explain(tokens, target=torch.ones(7))
    with pytest.raises(TypeError, match="expected a SWEPool but got MeanPool: explain_tokens takes"):
        explain_slices(MeanPool(4), tokens)


def test_in_mixed_precision_and_in_inference_mode():
    tokens, mask, _ = (part.float() if part.is_floating_point() else part for part in sets())
    pool = SWEPool(4, 5, readout="statistics", weightings=2)
    others = MeanPool(4), AttentionPool(4)
    expected = pool.explain(tokens + 20, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(pool.explain(tokens + 20, mask), expected)
    with torch.inference_mode():
        assert torch.equal(pool.explain(tokens + 20, mask.clone()), expected)
        for other in others:
            assert explain_tokens(other, tokens + 20, mask.clone(), target=torch.ones(4)).shape == (3, 9)


def test_a_compiled_pool_is_the_pool():
    tokens, mask, _ = (part.float() if part.is_floating_point() else part for part in sets())
    pool = SWEPool(4, 5)
    assert torch.equal(
        explain_tokens(torch.compile(pool, backend="eager"), tokens, mask), explain_tokens(pool, tokens, mask)
    )


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"expected target to be a torch\.Tensor but got list"):
        SWEPool(4, 5).explain(sets()[0].float(), target=[1.0] * 10)
