"""The compatible layer against the public formulas, written out here once more, element by element."""

import numpy as np
import pytest
import torch

import cswe
from cswe.compat import SWE_Pooling

DOUBLE = torch.float64


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def made(d_in=5, slices=4, points=7, seed=0):
    torch.manual_seed(seed)
    pool = SWE_Pooling(d_in, slices, points).double()
    with torch.no_grad():
        pool.reference.copy_(draw(seed + 1, points, slices))  # unsorted, so that argsort and rank differ
    return pool


def interpolated(x, y, wanted):
    """Linear interpolation of one sequence, the outermost pieces continued."""
    result = []
    for w in wanted:
        i = min(max(int(np.searchsorted(x, w)) - 1, 0), len(x) - 2)
        result.append(y[i] + (y[i + 1] - y[i]) / (np.finfo(float).eps + x[i + 1] - x[i]) * (w - x[i]))
    return np.array(result)


def written_out(pool, tokens, mask=None):
    """One sample and one slice at a time, in numpy."""
    v, g = pool.theta.weight_v.detach().numpy(), pool.theta.weight_g.detach().numpy()
    theta = g * v / np.linalg.norm(v, axis=1, keepdims=True)
    reference, weight = pool.reference.detach().numpy(), pool.weight.weight.detach().numpy()[0]
    points = reference.shape[0]
    wanted = np.linspace(0, 1, points + 2)[1:-1]
    out = np.zeros((len(tokens), len(theta)))
    for i, sample in enumerate(tokens.numpy()):
        for l, direction in enumerate(theta):
            values = sample @ direction
            count = len(values)
            if mask is None:
                ordered, x = np.sort(values), np.linspace(0, 1, count + 2)[1:-1]
                quantiles = ordered if count == points else interpolated(x, ordered, wanted)
            else:
                valid = mask[i].numpy().astype(bool)
                largest = np.sort(values[valid])[::-1]
                slope = (largest[0] - largest[1]) * (1 + valid.sum())
                x = np.arange(1, count + 1) / (1 + valid.sum())
                shift = 1e-3 * np.cumsum(~valid)
                values = np.where(valid, values, largest[0]) + slope * shift
                x = np.where(valid, x, x[valid].max()) + shift
                quantiles = interpolated(x, np.sort(values), wanted)
            gathered = quantiles[np.argsort(reference[:, l], kind="stable")]
            out[i, l] = ((reference[:, l] - gathered) * weight).sum()
    return out


@pytest.mark.parametrize("count", [7, 3, 20])
def test_without_mask(count):
    pool, tokens = made(), draw(5, 3, count, 5)
    np.testing.assert_allclose(pool(tokens).detach().numpy(), written_out(pool, tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("count", [7, 12])
@pytest.mark.parametrize("lengths", [(12, 4, 2), (7, 7, 5)])
def test_with_mask(count, lengths):
    pool, tokens = made(), draw(5, 3, count, 5)
    mask = (torch.arange(count) < torch.tensor([min(n, count) for n in lengths]).unsqueeze(1)).long()
    np.testing.assert_allclose(pool(tokens, mask).detach().numpy(), written_out(pool, tokens, mask), rtol=0, atol=1e-10)


def test_the_matching_is_theirs_and_not_ours():
    pool, tokens = made(), draw(5, 3, 7, 5)
    theirs = pool.embeddings(tokens)
    ranks = pool.reference.T.argsort(-1).argsort(-1)
    sorted_tokens = pool.get_slice(tokens).transpose(1, 2).sort(-1).values
    ours = pool.reference.T - sorted_tokens.gather(-1, ranks.expand(3, -1, -1))
    assert not torch.allclose(theirs, ours, atol=1e-2)


def test_checkpoints_of_both_ages():
    source = torch.nn.utils.weight_norm(torch.nn.Linear(5, 4, bias=False), dim=0)
    old = {
        "reference": draw(0, 7, 4).float(),
        "theta.weight_g": source.weight_g.detach(),
        "theta.weight_v": source.weight_v.detach(),
        "weight.weight": draw(1, 1, 7).float(),
    }
    pool = SWE_Pooling(5, 4, 7)
    assert set(pool.state_dict()) == set(old)
    pool.load_state_dict(old)
    tokens = draw(2, 2, 7, 5).float()
    torch.testing.assert_close(pool.get_slice(tokens), source(tokens))
    new = {key: value for key, value in old.items() if not key.startswith("theta")}
    new["theta.parametrizations.weight.original0"] = old["theta.weight_g"]
    new["theta.parametrizations.weight.original1"] = old["theta.weight_v"]
    other = SWE_Pooling(5, 4, 7)
    other.load_state_dict(new)
    assert torch.equal(other(tokens), pool(tokens))


def test_freezing():
    frozen = SWE_Pooling(5, 4, 7, freeze_swe=True)
    assert [name for name, p in frozen.named_parameters() if p.requires_grad] == ["weight.weight"]
    free = {name for name, p in SWE_Pooling(5, 4, 7).named_parameters() if p.requires_grad}
    assert free == {"reference", "theta.weight_v", "weight.weight"}


def test_migration_agrees_where_their_matching_is_right():
    pool, tokens = made(), draw(5, 3, 7, 5)
    with torch.no_grad():
        pool.reference.copy_(pool.reference.sort(0).values)  # sorted: argsort is the rank
    migrated = pool.to_pool()
    assert isinstance(migrated, cswe.SWEPool)
    torch.testing.assert_close(migrated(tokens), pool(tokens), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="6 reference coordinates a point do not fit in 5 dimensions"):
        SWE_Pooling(5, 6, 7).to_pool()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision(half):
    """Padding stands at −1e10 and is shifted by 0.001, for neither of which half precision has room."""
    pool, tokens, mask = made().float(), draw(5, 3, 9, 5).float(), torch.arange(9) < torch.tensor([[9], [4], [2]])
    expected = pool(tokens, mask)
    with torch.autocast("cpu", half):
        torch.testing.assert_close(pool(tokens, mask).float(), expected, rtol=0.05, atol=0.05)
    pool = pool.to(half)
    torch.testing.assert_close(pool(tokens.to(half), mask).float(), expected, rtol=0.05, atol=0.05)
    assert pool.to_pool().reference.dtype == half


def test_slices_of_another_length_do_not_migrate():
    pool = made()
    with torch.no_grad():
        pool.theta.weight_g[1] = 2
    with pytest.raises(ValueError, match=r"weight_g to be 1, .* lie between 1 and 2"):
        pool.to_pool()


def test_padding_is_never_read():
    pool, tokens = made(), draw(5, 2, 7, 5)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    expected = pool(tokens, mask)
    found = pool(tokens.masked_fill(~mask.unsqueeze(-1), torch.nan), mask)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert bool(torch.isfinite(pool.theta.weight_v.grad).all())


def test_compiled_in_one_graph():
    pool, tokens, mask = made(), draw(5, 2, 9, 5), torch.arange(9) < torch.tensor([[9], [4]])
    compiled = torch.compile(pool, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens, mask), pool(tokens, mask))


def test_counts_are_whole_numbers():
    with pytest.raises(TypeError, match=r"num_slices ≥ 1, a whole number, but got 4\.0"):
        SWE_Pooling(5, 4.0, 7)


def test_gradients_flow_and_sets_of_one_are_refused():
    pool, tokens = made(), draw(5, 3, 9, 5).requires_grad_()
    pool(tokens, torch.ones(3, 9)).sum().backward()
    assert all(p.grad is not None for p in pool.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="at least two"):
        pool(draw(0, 2, 1, 5))
    with pytest.raises(ValueError, match="at least two"):
        pool(draw(0, 2, 3, 5), torch.tensor([[1, 0, 0], [1, 1, 1]]))
