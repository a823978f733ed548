"""The pooling layer: what it contains, what it never reads, and how it travels."""

import copy
import io
import pickle

import ot
import pytest
import torch

import cswe
from cswe.nn import Flatten, MapPoints, Moments, Statistics, SWEPool
from cswe.ops import l_moments, swe

DOUBLE = torch.float64
READOUTS = ["moments:1", "moments:2", "moments:4", "moments:3:2", "statistics", "statistics:2", "flatten", "map-points"]
ALL_POOLS = [
    *(pytest.param(lambda r=r, h=h: SWEPool(6, 5, 9, r, h), id=f"{r}, {h}") for r in READOUTS for h in (0, 2)),
    pytest.param(lambda: SWEPool(6, 5, 9, "flatten", interpolation="linear", order="reference"), id="paper"),
    pytest.param(lambda: SWEPool(6, 20), id="more slices than dimensions, no reference"),
    pytest.param(lambda: cswe.MeanPool(6), id="mean"),
    pytest.param(lambda: cswe.SumPool(6), id="sum"),
    pytest.param(lambda: cswe.PMAPool(6, seeds=2, heads=3), id="set transformer"),
    pytest.param(lambda: cswe.WassersteinPool(6, points=4), id="full Wasserstein"),
    pytest.param(lambda: cswe.MaxPool(6), id="max"),
    pytest.param(lambda: cswe.CLSPool(6), id="cls"),
    pytest.param(lambda: cswe.AttentionPool(6), id="attention"),
    pytest.param(lambda: cswe.AttentionPool(6, queries=3, values=4), id="attention, values"),
]


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("make", ALL_POOLS)
class TestEveryPool:
    def test_shape_and_name(self, make):
        pool = make()
        assert pool(draw(0, 4, 7, 6)).shape == (4, pool.out_dim)
        assert f"out_dim={pool.out_dim}" in repr(pool)

    @pytest.mark.parametrize("side", ["left", "right", "scattered"])
    def test_padding_is_never_read(self, make, side):
        pool, tokens = make().double(), draw(0, 3, 6, 6, dtype=DOUBLE)
        places = {"left": range(4, 10), "right": range(6), "scattered": [0, 2, 3, 5, 8, 9]}[side]
        mask = torch.zeros(3, 10, dtype=torch.int64)
        mask[:, list(places)] = 1
        room = torch.full((3, 10, 6), torch.nan, dtype=DOUBLE)
        room[:, list(places)] = tokens
        room.requires_grad_()
        vector = pool(room, mask)
        torch.testing.assert_close(vector, pool(tokens), rtol=0, atol=1e-10)
        parameters = [p for p in pool.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(vector.square().sum(), [room, *parameters], allow_unused=True)
        assert bool((gradients[0][mask == 0] == 0).all())
        assert all(g is None or bool(torch.isfinite(g).all()) for g in gradients)

    def test_one_token_and_one_sample(self, make):
        pool = make()
        vector = pool(draw(0, 1, 1, 6).requires_grad_())
        vector.sum().backward()
        assert bool(torch.isfinite(vector).all())
        assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in pool.parameters())

    def test_the_order_of_tokens_does_not_matter(self, make):
        pool, tokens = make(), draw(0, 2, 8, 6)
        order = torch.randperm(8)
        if isinstance(pool, cswe.CLSPool):  # only its first token has a place
            order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(7)])
        torch.testing.assert_close(pool(tokens[:, order]), pool(tokens), rtol=1e-4, atol=1e-5)

    def test_copies_are_the_same(self, make):
        pool, tokens, mask = make(), draw(0, 2, 8, 6), torch.arange(8) < torch.tensor([[8], [3]])
        expected = pool(tokens, mask)
        assert torch.equal(copy.deepcopy(pool)(tokens, mask), expected)
        assert torch.equal(pickle.loads(pickle.dumps(pool))(tokens, mask), expected)
        file = io.BytesIO()
        torch.save(pool.state_dict(), file)
        file.seek(0)
        other = make()
        for parameter in other.parameters():
            torch.nn.init.normal_(parameter)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(other(tokens, mask), expected)

    def test_compiles_to_one_graph(self, make):
        pool, tokens, mask = make(), draw(0, 2, 8, 6), torch.arange(8) < torch.tensor([[8], [3]])
        torch.compiler.reset()
        compiled = torch.compile(pool, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(tokens, mask), pool(tokens, mask))

    def test_exports_with_any_number_of_sets_and_tokens(self, make):
        pool, tokens, mask = make().eval(), draw(0, 3, 8, 6), torch.arange(8) < torch.tensor([[8], [3], [5]])
        batch, count = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("count", min=1, max=512)
        program = torch.export.export(pool, (tokens, mask), dynamic_shapes=({0: batch, 1: count}, {0: batch, 1: count}))
        calls = {node.target for node in program.graph.nodes if node.op == "call_function"}
        assert not any("cswe" in str(target) for target in calls)
        tokens, mask = draw(1, 5, 13, 6), torch.arange(13) < torch.tensor([[13], [3], [5], [1], [9]])
        torch.testing.assert_close(program.module()(tokens, mask), pool(tokens, mask))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_precisions(self, make, dtype):
        pool, tokens = make(), draw(0, 2, 8, 6).to(dtype)
        has_parameters = any(True for _ in pool.parameters())
        vector = pool(tokens)
        assert vector.dtype == (torch.float32 if has_parameters else dtype)
        rounding = 0 if has_parameters else 2 * torch.finfo(dtype).eps  # of the result, where it is in half precision
        torch.testing.assert_close(vector.float(), pool(tokens.float()), rtol=rounding, atol=rounding)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(pool(tokens.float()), pool(tokens).float())
            assert pool(tokens.float()).dtype == torch.float32
        assert pool.to(dtype)(tokens).dtype == dtype

    def test_wrong_width(self, make):
        with pytest.raises(ValueError, match=r"tokens of shape \(B, N, 6\) but got \(2, 8, 5\)"):
            make()(draw(0, 2, 8, 5))

    def test_empty_set(self, make):
        with pytest.raises(ValueError, match="sample 1 without a single valid token"):
            make()(draw(0, 2, 3, 6), torch.tensor([[1, 1, 1], [0, 0, 0]]))


class TestWhatItContains:
    @pytest.mark.parametrize("count", [1, 2, 7, 50])
    def test_mean_pooling(self, count):
        tokens = draw(0, 3, count, 6, dtype=DOUBLE)
        pool = SWEPool(6, 6, readout=Moments(1)).double()
        torch.testing.assert_close(pool(tokens) @ pool.slicer.directions(), tokens.mean(1), rtol=0, atol=1e-6)
        more = SWEPool(6, 6, readout=Moments(4)).double()
        means = more(tokens).reshape(3, 6, 4)[..., 0]
        torch.testing.assert_close(means @ more.slicer.directions(), tokens.mean(1), rtol=0, atol=1e-6)

    def test_attention_pooling(self):
        tokens, mask = draw(0, 3, 9, 6, dtype=DOUBLE), torch.arange(9) < torch.tensor([[9], [4], [1]])
        pool = SWEPool(6, 6, readout=Moments(1), weightings=3).double()
        pool.slicer.reset_parameters()  # orthogonal in float64
        attention = cswe.AttentionPool(6, queries=3).double()
        attention.token_weights.load_state_dict(pool.token_weights.state_dict())
        rotated = pool(tokens, mask).reshape(3, 3, 6) @ pool.slicer.directions()
        torch.testing.assert_close(rotated.flatten(1), attention(tokens, mask), rtol=0, atol=1e-10)

    def test_l_moments(self):
        tokens, mask = draw(0, 3, 9, 6, dtype=DOUBLE), torch.arange(9) < torch.tensor([[9], [4], [1]])
        pool = SWEPool(6, 5, readout=Moments(4)).double()
        projections = (tokens @ pool.slicer.directions().T).mT
        expected = l_moments(projections, 4, mask=mask.unsqueeze(1))
        torch.testing.assert_close(pool(tokens, mask), expected.flatten(1), rtol=0, atol=1e-10)

    def test_the_papers_embedding(self):
        tokens, mask = draw(0, 3, 9, 6, dtype=DOUBLE), torch.arange(9) < torch.tensor([[9], [4], [1]])
        pool = SWEPool(6, 5, 7, readout=Flatten(), order="reference").double()
        expected = swe(tokens, pool.reference, pool.slicer.weight, mask=mask)
        torch.testing.assert_close(pool(tokens, mask), expected.flatten(1), rtol=0, atol=1e-12)
        linear = SWEPool(6, 5, 7, readout="flatten", order="reference", interpolation="linear").double()
        linear.load_state_dict(pool.state_dict())
        expected = swe(tokens, pool.reference, pool.slicer.weight, mask=mask, interpolation="linear")
        torch.testing.assert_close(linear(tokens, mask), expected.flatten(1), rtol=0, atol=1e-12)

    def test_attentive_statistics(self):
        """Okabe et al.'s formulas, written out."""
        tokens = draw(0, 3, 9, 6, dtype=DOUBLE) + 100
        pool = SWEPool(6, 5, readout=Statistics(), weightings=2).double()
        masses = pool.token_weights(tokens)
        projections = tokens @ pool.slicer.directions().T
        means = torch.einsum("bhn,bnl->bhl", masses, projections)
        squares = (projections.unsqueeze(1) - means.unsqueeze(2)).square()
        deviations = torch.einsum("bhn,bhnl->bhl", masses, squares).sqrt()
        expected = torch.cat([means.flatten(1), deviations.flatten(1)], 1)
        torch.testing.assert_close(pool(tokens), expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("weightings", [0, 2])
    def test_means_along_some_slices_only(self, weightings):
        """Of the same numbers those means are left out that the others say already."""
        tokens, mask = draw(0, 3, 9, 6, dtype=DOUBLE), torch.arange(9) < torch.tensor([[9], [4], [1]])
        heads = max(1, weightings)
        for whole, some in ((Moments(3), Moments(3, means=6)), (Statistics(), Statistics(means=6))):
            pool, short = (SWEPool(6, 8, readout=readout, weightings=weightings).double() for readout in (whole, some))
            short.load_state_dict(pool.state_dict())
            vector = pool(tokens, mask)
            if isinstance(whole, Moments):
                numbers = vector.reshape(3, heads, 8, 3)
                means, higher = numbers[..., 0], numbers[..., 1:]
            else:
                means, higher = vector.reshape(3, 2, heads, 8).unbind(1)
            expected = torch.cat([means[..., :6].flatten(1), higher.flatten(1)], 1)
            torch.testing.assert_close(short(tokens, mask), expected, rtol=0, atol=1e-12)
            left_out = means[..., :6] @ torch.linalg.inv(pool.slicer.directions()[:6]).T
            left_out = left_out @ pool.slicer.directions()[6:].T
            torch.testing.assert_close(left_out, means[..., 6:], rtol=0, atol=1e-6)

    def test_a_learned_map_over_points(self):
        tokens = draw(0, 3, 9, 6, dtype=DOUBLE)
        pool = SWEPool(6, 5, 7, readout=MapPoints(7)).double()
        flat = SWEPool(6, 5, 7, readout="flatten").double()
        flat.load_state_dict({name: p for name, p in pool.state_dict().items() if "readout" not in name})
        expected = flat(tokens).reshape(3, 5, 7) @ pool.readout.map.weight[0]
        torch.testing.assert_close(pool(tokens), expected)


class TestFullWasserstein:
    def test_the_plan_has_the_right_masses(self):
        tokens, mask = draw(0, 3, 9, 6, dtype=DOUBLE), torch.arange(9) < torch.tensor([[9], [4], [1]])
        pool = cswe.WassersteinPool(6, points=5, iterations=300).double()
        plan = pool.plan(tokens, mask)
        torch.testing.assert_close(plan.sum(1), torch.full((3, 5), 0.2, dtype=DOUBLE))
        rows = mask.double() / mask.sum(1, keepdim=True)
        torch.testing.assert_close(plan.sum(2), rows, rtol=0, atol=1e-3)

    def test_a_small_blur_gives_the_exact_plan(self):
        """Against POT, where reference points and tokens pair off clearly."""
        pool = cswe.WassersteinPool(3, points=6, blur=0.01, iterations=500).double()
        tokens = (pool.reference.detach() + 0.2 * draw(0, 6, 3, dtype=DOUBLE))[torch.randperm(6)].unsqueeze(0)
        costs = torch.cdist(tokens[0], pool.reference.detach()).square()
        exact = torch.from_numpy(ot.emd([], [], costs.numpy()))
        expected = 6 * exact.T @ tokens[0] - pool.reference.detach()
        torch.testing.assert_close(pool(tokens).reshape(6, 3).detach(), expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("readout", READOUTS)
class TestWeights:
    def test_are_repetitions(self, readout):
        tokens, counts = draw(0, 1, 5, 6, dtype=DOUBLE), torch.tensor([3, 1, 0, 2, 4])
        repeated = tokens[0].repeat_interleave(counts, 0).unsqueeze(0)
        for weightings in (0, 2):
            pool = SWEPool(6, 5, 7, readout, weightings).double()
            weighted = pool(tokens, weights=counts.double().unsqueeze(0))
            torch.testing.assert_close(weighted, pool(repeated), rtol=0, atol=1e-9)

    def test_gradients_reach_values_weights_and_queries(self, readout):
        pool = SWEPool(4, 3, 5, readout, weightings=2).double()
        tokens, weights = draw(0, 2, 6, 4, dtype=DOUBLE), draw(1, 2, 6, dtype=DOUBLE).abs() + 0.1
        names = [name for name, _ in pool.named_parameters() if pool.readout.needs_reference or name != "reference"]
        parameters = [pool.get_parameter(name).detach().clone().requires_grad_() for name in names]

        def run(tokens, weights, *parameters):
            state = dict(zip(names, parameters, strict=True))
            return torch.func.functional_call(pool, state, (tokens,), {"weights": weights})

        inputs = (tokens.requires_grad_(), weights.requires_grad_(), *parameters)
        assert torch.autograd.gradcheck(run, inputs)
        gradients = torch.autograd.grad(run(*inputs).square().sum(), inputs)
        assert all(float(g.abs().max()) > 0 for g in gradients)


class TestNormalizedKeys:
    """Scores that see directions alone."""

    def test_lengths_do_not_count(self):
        weights = cswe.TokenWeights(6, 2, normalize_keys=True).double()
        tokens, lengths = draw(0, 3, 5, 6, dtype=DOUBLE), torch.tensor([1.0, 50.0, 0.01, 2.0, 1e3], dtype=DOUBLE)
        torch.testing.assert_close(weights(tokens * lengths.unsqueeze(-1)), weights(tokens))
        plain = cswe.TokenWeights(6, 2).double()
        assert float((plain(tokens * lengths.unsqueeze(-1)) - plain(tokens)).detach().abs().max()) > 0.1

    def test_tokens_of_one_length_are_weighed_as_before(self):
        weights, plain = cswe.TokenWeights(4, 3, normalize_keys=True), cswe.TokenWeights(4, 3)
        plain.load_state_dict(weights.state_dict())
        tokens = 2 * torch.nn.functional.normalize(draw(0, 2, 5, 4), dim=-1)  # √d long
        torch.testing.assert_close(weights(tokens), plain(tokens))

    def test_a_token_without_a_direction(self):
        tokens = (draw(0, 2, 5, 4) * (torch.arange(5) > 0).unsqueeze(-1)).requires_grad_()
        masses = cswe.AttentionPool(4, 2, normalize_keys=True).token_weights(tokens)
        assert bool(torch.isfinite(masses).all())
        assert bool(torch.isfinite(torch.autograd.grad(masses.square().sum(), tokens)[0]).all())

    def test_attention_is_still_contained(self):
        pool = SWEPool(4, 4, readout="moments:1", weightings=2, normalize_keys=True)
        rival = cswe.AttentionPool(4, queries=2, normalize_keys=True)
        rival.token_weights.load_state_dict(pool.token_weights.state_dict())
        tokens = draw(0, 3, 7, 4) * 5
        found = pool(tokens).reshape(3, 2, 4) @ pool.slicer.directions()
        torch.testing.assert_close(found, rival(tokens).reshape(3, 2, 4), rtol=0, atol=1e-4)


class TestStartingFromData:
    def test_principal_directions_and_quantiles(self):
        tokens = draw(0, 20, 30, 6, dtype=DOUBLE) * torch.tensor([5.0, 3, 1, 1, 0.5, 0.1], dtype=DOUBLE) + 7
        mask = torch.rand(20, 30) < 0.8
        mask[:, 0] = True
        tokens[~mask] = torch.nan
        pool = SWEPool(6, 9, 50).double().init_from(tokens, mask)
        torch.testing.assert_close(pool.slicer.weight.norm(dim=1), torch.ones(9, dtype=DOUBLE))
        assert float(pool.slicer.weight.detach()[0, 0].abs()) > 0.99
        assert float(pool.slicer.weight.detach()[1, 1].abs()) > 0.99
        valid = tokens[mask]
        for axis in pool.slicer.weight[:2]:
            levels = torch.tensor([0.1, 0.5, 0.9], dtype=DOUBLE)
            ours, theirs = (
                torch.quantile(pool.reference.detach() @ axis.detach(), levels),
                torch.quantile(valid @ axis.detach(), levels),
            )
            assert float((ours - theirs).abs().max()) < 0.6

    def test_standardising_makes_scale_and_place_irrelevant(self):
        tokens = draw(0, 20, 30, 6, dtype=DOUBLE)
        pool = SWEPool(6, 5, 9, readout="flatten", standardize=True).double().init_from(tokens)
        moved = SWEPool(6, 5, 9, readout="flatten", standardize=True).double().init_from(100 * tokens - 7)
        moved.slicer.weight.data.copy_(pool.slicer.weight)
        moved.reference.data.copy_(pool.reference)
        torch.testing.assert_close(moved(100 * tokens - 7), pool(tokens))
        assert {"statistics.mean", "statistics.spread"} <= set(pool.state_dict())
        bound, moved_bound = (cswe.SWGGBound(p, 1.0) for p in (pool, moved))
        torch.testing.assert_close(moved_bound(100 * tokens - 7), bound(tokens))

    def test_forgetting_to_measure_is_an_error(self):
        pool = SWEPool(6, 5, standardize=True)
        with pytest.raises(RuntimeError, match="init_from"):
            pool(draw(0, 2, 3, 6))
        fitted = SWEPool(6, 5, standardize=True).init_from(draw(0, 2, 3, 6))
        pool.load_state_dict(fitted.state_dict())
        assert torch.equal(pool(draw(0, 2, 3, 6)), fitted(draw(0, 2, 3, 6)))

    def test_whether_it_was_measured_travels_with_the_pool(self):
        fresh, tokens = SWEPool(6, 5, standardize=True), draw(0, 2, 3, 6)
        averaged = torch.optim.swa_utils.AveragedModel(fresh, use_buffers=True)
        for state in (SWEPool(6, 5, standardize=True).state_dict(), {"slicer.weight": fresh.slicer.weight.detach()}):
            fresh.load_state_dict(state, strict=False)
            with pytest.raises(RuntimeError, match="init_from"):
                fresh(tokens)
        fresh.init_from(tokens)
        averaged.update_parameters(fresh)
        assert torch.equal(averaged(tokens), fresh(tokens))
        loaded = SWEPool(6, 5, standardize=True)
        loaded.load_state_dict(fresh.state_dict())
        exported = torch.export.export(loaded, (tokens,)).module()  # without a look at values in the graph
        assert torch.equal(exported(tokens), fresh(tokens))

    def test_slices_that_are_computed_from_others(self):
        tokens = draw(0, 20, 30, 6)
        pool, plain = (SWEPool(6, 5, 9, "flatten") for _ in range(2))
        torch.nn.utils.parametrizations.orthogonal(pool.slicer)
        pool.init_from(tokens)
        plain.init_from(tokens)
        torch.testing.assert_close(pool.slicer.directions().abs(), plain.slicer.directions().abs(), rtol=0, atol=1e-5)
        before = pool.slicer.directions()
        pool.reset_parameters()
        assert not torch.allclose(pool.slicer.directions(), before)


class TestParameters:
    def test_names_are_fixed(self):
        names = set(SWEPool(6, 5, 9, weightings=2).state_dict())
        assert names == {"slicer.weight", "reference", "token_weights.key.weight", "token_weights.query"}

    @pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
    def test_half_precision_from_the_start(self, half):
        """As a large model is made: torch has no QR decomposition for orthogonal slices in half precision."""
        torch.set_default_dtype(half)
        try:
            pool = SWEPool(6, 9, 5)
        finally:
            torch.set_default_dtype(torch.float32)
        pool.reset_parameters()
        assert pool.slicer.weight.dtype == half
        first = pool.slicer.directions().detach()[:6]
        torch.testing.assert_close(first @ first.T, torch.eye(6), rtol=0, atol=0.02)

    @pytest.mark.parametrize("init", ["orthogonal", "normal"])
    def test_slices_start_with_unit_length(self, init):
        weight = SWEPool(6, 14, init=init).slicer.weight
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(14))
        if init == "orthogonal":
            torch.testing.assert_close(weight[:6] @ weight[:6].T, torch.eye(6), rtol=0, atol=1e-5)
            torch.testing.assert_close(weight[6:12] @ weight[6:12].T, torch.eye(6), rtol=0, atol=1e-5)

    def test_what_is_left_to_us(self):
        pool = SWEPool(6, 5)
        assert (type(pool.readout).__name__, pool.weightings, pool.out_dim) == ("Moments", 1, 10)
        same = SWEPool(6, 5, readout="moments:2", weightings=1)
        same.load_state_dict(pool.state_dict())
        assert torch.equal(pool(draw(0, 2, 3, 6)), same(draw(0, 2, 3, 6)))
        assert SWEPool(6, 5, readout="moments:2").weightings == 0  # a readout of one's own is taken at its word
        assert SWEPool(6, 5, interpolation="linear").weightings == 0

    def test_freezing(self):
        pool = SWEPool(6, 5, 9, "flatten", train_slices=False, train_reference=False)
        assert not any(p.requires_grad for p in pool.parameters())

    def test_reset_draws_anew(self):
        pool = SWEPool(6, 5, 9, "map-points", weightings=2)
        before = copy.deepcopy(pool.state_dict())
        pool.reset_parameters()
        assert all(not torch.equal(before[name], value) for name, value in pool.state_dict().items())
