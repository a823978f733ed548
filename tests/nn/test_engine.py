"""The rest of the engine: more constraints, more readouts, and Algorithm 1 on measures."""

import copy
import math
import pickle

import pytest
import torch

import cswe
from cswe.nn import (
    Concat,
    DualWeighted,
    MapPoints,
    MapSlices,
    MeanPoints,
    MeanSlices,
    SWEPool,
    learn_slices,
)  # fmt: skip
from cswe.ops import swe, swgg, wasserstein_1d

DOUBLE = torch.float64


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def angle(theta):
    return math.degrees(math.atan2(float(theta[1]), float(theta[0]))) % 180


def apart(a, b):
    return min(abs(a - b) % 180, 180 - abs(a - b) % 180)


class TestLearnSlices:
    def gaussian_pair(self, count=4000):
        """Clouds whose empirical covariances are exactly the given ones."""
        covariances = torch.tensor([[[4.0, 1.0], [1.0, 1.0]], [[1.0, -0.8], [-0.8, 3.0]]], dtype=DOUBLE)
        clouds = []
        for seed, covariance in enumerate(covariances):
            sample = draw(seed, count, 2)
            sample = sample - sample.mean(0)
            white = sample @ torch.linalg.inv(torch.linalg.cholesky(sample.T @ sample / count)).T
            clouds.append(white @ torch.linalg.cholesky(covariance).T)
        return clouds[0], clouds[1] + torch.tensor([1.0, 2.0]), covariances

    def closed_form(self, covariances, degrees):
        radians = torch.deg2rad(degrees)
        theta = torch.stack([radians.cos(), radians.sin()], 1)
        first, second = covariances
        cross = torch.einsum("nd,de,ef,nf->n", theta, first, second, theta)
        spread = torch.einsum("nd,de,ne->n", theta, first, theta) * torch.einsum("nd,de,ne->n", theta, second, theta)
        return (5 + first.trace() + second.trace() - 2 * cross / spread.sqrt()).sqrt()

    @pytest.mark.parametrize("slack", [2.0, 20.0])
    def test_gaussians_reach_the_closed_form_optimum(self, slack):
        x, y, covariances = self.gaussian_pair()
        degrees = torch.arange(0, 180, 0.05, dtype=DOUBLE)
        levels = self.closed_form(covariances, degrees)
        wanted = torch.tensor([math.cos(math.radians(100)), math.sin(math.radians(100))], dtype=DOUBLE)
        radians = torch.deg2rad(degrees)
        objective = 1 - (torch.stack([radians.cos(), radians.sin()], 1) @ wanted).square()
        bound = float(levels.min() + 0.25 * (levels.max() - levels.min()))
        penalised = objective + slack / 2 * (levels - bound).clamp(min=0).square()
        best = float(degrees[penalised.argmin()])
        starts = torch.tensor([[1.0, 0.2], [0.3, 1.0], [-0.8, 1.0]], dtype=DOUBLE)
        found = learn_slices(
            x, y, lambda theta: (1 - (theta @ wanted).square()).sum(), starts, bound, slack,
            relaxation=cswe.SoftSort(0.02, True), steps=500, lr=0.02, dual_lr=0.2, slack_lr=min(0.2, 1 / slack),
        )  # fmt: skip
        errors = [apart(angle(theta), best) for theta in found.slices]
        # Of a finite sample D wiggles around the closed form: within 2° of its optimum.
        assert min(errors) < 2, (errors, best)
        assert found.record["slices"].shape == (500, 3, 2)
        assert float((found.slacks - found.duals / slack).abs().max()) < 0.02

    def test_pairs_by_mean_and_one_by_one(self):
        xs, ys = [draw(0, 20, 3), draw(1, 15, 3)], [draw(2, 12, 3) + 1, draw(3, 15, 3) - 1]
        mean = learn_slices(xs, ys, lambda theta: theta.sum(), 2, cswe.Fraction(0.9, batches=2), slack=1.0, steps=5)
        assert mean.values.shape == (2,)
        expected = torch.stack(
            [swgg(x[None], y, mean.slices, cswe.SoftSort(0.1, True))[0] for x, y in zip(xs, ys, strict=True)]
        )
        torch.testing.assert_close(mean.values, expected.mean(0))
        pairwise = learn_slices(xs, ys, lambda theta: theta.sum(), 2, 2.0, slack=1.0, steps=5, per="pair")
        assert pairwise.values.shape == pairwise.duals.shape == (4,)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"y": [draw(0, 5, 2)] * 2}, ValueError, "as many point sets in x as in y but got 1 and 2"),
            ({"per": "all"}, ValueError, "'mean' or 'pair'"),
            ({"objective": lambda theta: theta}, TypeError, "return a scalar"),
            ({"objective": None}, TypeError, "a function of the slices but got NoneType"),
            ({"slices": torch.tensor([1.0, 0.5])}, ValueError, r"slices of shape \(L, 2\) but got \(2,\)"),
            ({"slices": torch.ones(1, 3)}, ValueError, r"slices of shape \(L, 2\) but got \(1, 3\)"),
            ({"x": [[0.0, 1.0]]}, TypeError, "expected x to be a torch.Tensor but got list"),
            ({"steps": 2.0}, TypeError, "steps ≥ 1, a whole number, but got 2.0"),
            ({"bound": cswe.Fraction(0.9, batches=50), "steps": 3}, ValueError, "3 steps were too few"),
        ],
    )
    def test_errors(self, change, error, message):
        settings = {"x": draw(0, 5, 2), "y": draw(1, 5, 2), "objective": lambda t: t.sum(), "slices": 2, "bound": 1.0}
        with pytest.raises(error, match=message):
            learn_slices(**{**settings, "steps": 2, **change})


class TestConstraints:
    """Every constraint alone ends at a KKT point: stationary, active, its multiplier the price of its slack."""

    PRICE = 5.0

    def reaches_kkt_point(self, pool, constraint, loss, tokens, steps=2500):
        duals = cswe.PrimalDual(constraint, lr=0.2, slack_lr=0.2, slack_weight=self.PRICE)
        optimizer = torch.optim.SGD(pool.parameters(), lr=0.02)
        for _ in range(steps):
            optimizer.zero_grad()
            duals.lagrangian(loss(), tokens).backward()
            optimizer.step()
            duals.step()
        (state,) = duals.record().values()
        values = constraint(tokens)
        excess = (values - state["bound"]).clamp(min=0)
        torch.testing.assert_close(excess.detach(), state["slack"], rtol=0, atol=1e-3)
        torch.testing.assert_close(state["dual"], self.PRICE * state["slack"], rtol=0, atol=1e-3)
        penalised = loss() + self.PRICE / 2 * excess.square().sum()
        trained = [parameter for parameter in pool.parameters() if parameter.requires_grad]
        for gradient in torch.autograd.grad(penalised, trained, allow_unused=True):
            assert gradient is None or float(gradient.norm()) < 1e-3
        assert float(state["dual"].min()) > 0.01, "the loss should push against the bound"
        return state

    def test_orthogonality(self):
        torch.manual_seed(0)
        pool = SWEPool(4, 2).double()
        target = torch.nn.functional.normalize(draw(0, 4), dim=0)
        self.reaches_kkt_point(
            pool,
            cswe.Orthogonality(pool, 0.5),
            lambda: -(pool.slicer.directions() @ target).square().sum(),  # both slices want the same direction
            draw(1, 2, 3, 4),
        )

    def test_swgg(self):
        torch.manual_seed(0)
        tokens = draw(0, 6, 12, 2) * torch.tensor([3.0, 0.5], dtype=DOUBLE)
        for relaxation in (cswe.SoftSort(1.0), cswe.LapSum(1.0)):
            pool = SWEPool(2, 1, 12).double()
            self.reaches_kkt_point(
                pool,
                cswe.SWGGBound(pool, 2.0, relaxation),
                lambda pool=pool: 0.3 * (pool.reference - 2).square().sum() - pool.slicer.directions()[0, 1].square(),
                tokens,
                steps=1000,
            )

    def test_min_sliced_wasserstein(self):
        torch.manual_seed(0)
        tokens = draw(0, 6, 12, 2) * torch.tensor([3.0, 0.5], dtype=DOUBLE)
        pool = SWEPool(2, 1, 12, train_reference=False).double()
        constraint = cswe.MinSlicedWasserstein(pool, bound=1.5)
        projected = (tokens @ pool.slicer.directions().T).mT
        reference = (pool.reference @ pool.slicer.directions().T).T
        expected = -wasserstein_1d(projected, reference.expand(6, 1, -1)).mean(0)
        torch.testing.assert_close(constraint(tokens), expected)
        # The loss asks for the second axis, along which everything is close.
        self.reaches_kkt_point(pool, constraint, lambda: -pool.slicer.directions()[0, 1].square(), tokens)

    def test_orthogonality_that_cannot_be(self):
        with pytest.raises(ValueError, match=r"10 slices in 5 dimensions cannot be closer to orthogonal than 3\.162"):
            cswe.Orthogonality(SWEPool(5, 10), 1.0)

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda pool: cswe.Orthogonality(pool, cswe.Fraction(0.9)), TypeError, "bound to be a number, δ"),
            (lambda pool: cswe.Orthogonality(torch.nn.Sequential(pool), 1.0), TypeError, "got Sequential; of a model"),
            (lambda pool: cswe.SWGGBound(cswe.MeanPool(3), 1.0), TypeError, "SWGGBound of a SWEPool but got MeanPool"),
            (lambda pool: cswe.SWGGBound(pool, [1.0] * 3), ValueError, "one for each of 2 slices, but got 3 numbers"),
            (
                lambda pool: cswe.SWGGBound(pool, 1.0, 0.1),
                TypeError,
                "relaxation to be None, SoftSort or LapSum but got 0",
            ),
            (lambda pool: DualWeighted(2, temperature=math.nan), ValueError, "temperature > 0 but got nan"),
            (lambda pool: cswe.WassersteinPool(3, 2, blur=math.nan), ValueError, "blur > 0 but got nan"),
            (lambda pool: cswe.MinSlicedWasserstein(pool, "a"), TypeError, "bound to be a number, a vector or"),
            (lambda pool: cswe.MinSlicedWasserstein(SWEPool(3, 2), 1.0), ValueError, "give it points=M"),
        ],
    )
    def test_wrong_arguments(self, make, error, message):
        with pytest.raises(error, match=message):
            make(SWEPool(3, 2, 9))

    def test_a_compiled_pool_is_the_pool(self):
        pool = SWEPool(3, 2, 9)
        compiled = torch.compile(pool, backend="eager")
        for kind in (cswe.SWGGBound, cswe.Orthogonality, cswe.MinSlicedWasserstein):
            assert kind(compiled, torch.tensor(1.0)).pool is pool

    def bounds(self, pool):
        """All that a pool's slices can be bound to."""
        return [
            cswe.SWGGBound(pool, 1.0, cswe.SoftSort(0.5, relative=True)),
            cswe.SWGGBound(pool, 1.0, name="every", per_sample=True),
            cswe.Orthogonality(pool, 0.1),
            cswe.MinSlicedWasserstein(pool, 0.3),
        ]

    def test_mixed_precision_changes_nothing(self):
        torch.manual_seed(0)
        pool, tokens = SWEPool(8, 4, 5), draw(0, 3, 200, 8, dtype=torch.float32)
        pool.slicer.weight.data += 0.03 * torch.randn(4, 8)
        values = (tokens.flatten(0, 1), torch.tensor([0, 150, 350, 600]))
        for bound in self.bounds(pool):
            for sets in (tokens, values):
                exact = bound(sets)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    mixed = bound(sets)
                assert torch.equal(mixed, exact)
                slopes = [torch.autograd.grad(each.sum(), pool.slicer.weight)[0] for each in (exact, mixed)]
                assert torch.equal(*slopes)
                assert float(slopes[0].abs().max()) > 0

    def test_sets_of_different_sizes(self):
        pool = SWEPool(3, 2, 9).double()
        values, ptr = draw(0, 13, 3), torch.tensor([0, 3, 13])
        duals = cswe.PrimalDual(self.bounds(pool), lr=0.1)
        duals.lagrangian(pool((values, ptr)).sum(), (values, ptr)).backward()
        duals.step()
        padded = torch.nn.utils.rnn.pad_sequence(list(values.split([3, 10])), batch_first=True)
        mask = torch.arange(10) < torch.tensor([[3], [10]])
        for bound in self.bounds(pool):
            torch.testing.assert_close(duals.record()[bound.name]["values"], bound(padded, mask).detach())
        assert cswe.MinSlicedWasserstein(pool, 0.3).count((values, ptr)) == 2

    def test_a_batch_of_nobody_counts_for_nothing(self):
        """A process of many may have no sample at a step; it must go on with the others."""
        pool, tokens = SWEPool(3, 2, 9), draw(0, 5, 9, 3, dtype=torch.float32)
        alone, beside = (cswe.PrimalDual(self.bounds(pool), lr=0.1) for _ in range(2))
        beside.lagrangian(pool(tokens[:0]).sum(), tokens[:0]).backward()
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in pool.parameters())
        for bound in self.bounds(pool):
            # Processes exchange gradients: they must all have one of the same parameters.
            reached = [
                [slope is not None for slope in torch.autograd.grad(
                    bound(sets).sum(), [pool.slicer.weight, pool.reference], allow_unused=True
                )]
                for sets in (tokens, tokens[:0])
            ]  # fmt: skip
            assert reached[0] == reached[1], bound
        for duals in (alone, beside):
            duals.lagrangian(pool(tokens).sum(), tokens).backward()
            duals.step()
        for name, state in alone.record().items():
            assert torch.equal(state["dual"], beside.record()[name]["dual"]), name
        assert cswe.SWGGBound(pool, 1.0).hard(tokens[:0]).tolist() == [0.0, 0.0]

    def test_every_sample(self):
        pool, tokens = SWEPool(3, 2, 9).double(), draw(0, 5, 9, 3)
        distances = swgg(tokens, pool.reference, pool.slicer.weight, cswe.SoftSort(1.0, relative=True))
        level = float(distances.detach().median())
        constraint = cswe.SWGGBound(pool, level, per_sample=True)
        torch.testing.assert_close(constraint(tokens), level + (distances - level).clamp(min=0).mean(0))
        assert float((cswe.SWGGBound(pool, 100.0, per_sample=True)(tokens).detach() - 100).abs().max()) == 0
        with pytest.raises(ValueError, match="per_sample needs the bound itself"):
            cswe.SWGGBound(pool, cswe.Fraction(0.9), per_sample=True)

    def test_together(self):
        torch.manual_seed(0)
        pool, tokens = SWEPool(3, 2, 9).double(), draw(0, 5, 9, 3)
        constraints = [
            cswe.SWGGBound(pool, 1.0, cswe.LapSum(0.5, relative=True)),
            cswe.Orthogonality(pool, 0.2),
            cswe.MinSlicedWasserstein(pool, 0.1),
            cswe.Constraint(lambda tokens: pool.reference.square().mean().reshape(1), 2.0, name="size"),
        ]
        duals = cswe.PrimalDual(constraints, lr=0.02, slack_lr=0.02, slack_weight=1.0)
        optimizer = torch.optim.SGD(pool.parameters(), lr=0.02)
        for _ in range(300):
            optimizer.zero_grad()
            duals.lagrangian(pool(tokens).square().mean(), tokens).backward()
            optimizer.step()
            duals.step()
        record = duals.record()
        assert set(record) == {"swgg", "orthogonality", "sliced_wasserstein", "size"}
        for name, state in record.items():
            assert bool((state["values"] <= state["bound"] + state["slack"] + 0.03).all()), name


class TestReadouts:
    def z(self, pool, tokens):
        return swe(tokens, pool.reference, pool.slicer.weight, order="rank")

    def test_means_and_maps(self):
        tokens = draw(0, 4, 9, 3)
        for readout, expected in (
            (MeanPoints(), lambda z, r: z.mean(-1)),
            (MeanSlices(), lambda z, r: z.mean(-2)),
            (MapSlices(5), lambda z, r: torch.einsum("blm,l->bm", z, r.map.weight[0])),
            (MapPoints(7), lambda z, r: torch.einsum("blm,m->bl", z, r.map.weight[0])),
        ):
            pool = SWEPool(3, 5, 7, readout).double()
            torch.testing.assert_close(pool(tokens), expected(self.z(pool, tokens), pool.readout))
            assert pool(tokens).shape == (4, pool.out_dim)

    def test_by_name(self):
        for name, size in (("map-slices", 7), ("mean-points", 5), ("mean-slices", 7)):
            assert SWEPool(3, 5, 7, name).out_dim == size

    def test_duals_weigh_slices(self):
        tokens, state = draw(0, 4, 9, 3), {"dual": None}
        pool = SWEPool(3, 5, 7, DualWeighted(5, lambda: state["dual"], temperature=0.5)).double()
        torch.testing.assert_close(pool(tokens), self.z(pool, tokens).mean(1))
        state["dual"] = torch.tensor([0.0, 1, 2, 3, 4])
        weights = torch.softmax(-state["dual"].double() / 0.5, 0)
        expected = torch.einsum("blm,l->bm", self.z(pool, tokens), weights)
        torch.testing.assert_close(pool(tokens), expected)
        state["dual"] = torch.zeros(4)
        with pytest.raises(ValueError, match=r"expected multipliers to give 5 numbers but got \(4,\)"):
            pool(tokens)
        state["dual"] = torch.zeros(5)
        torch.testing.assert_close(pool.eval()(tokens), expected)  # evaluation keeps the weights of training
        for other in (copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
            torch.testing.assert_close(other(tokens), expected)

    def test_duals_of_a_training_loop(self):
        """As its documentation says it, with more than one pass before a step."""
        tokens = draw(0, 4, 9, 3, dtype=torch.float32)
        pool = SWEPool(3, 5, 7, DualWeighted(5, lambda: duals.record().get("swgg", {}).get("dual")))
        duals = cswe.PrimalDual(cswe.SWGGBound(pool, 0.5), lr=1.0)
        for _ in range(2):
            loss = pool(tokens).square().mean() + pool(tokens[:2]).square().mean()
            duals.lagrangian(loss, tokens).backward()
            duals.step()
        pool((tokens.flatten(0, 1), torch.tensor([0, 3, 36]))).sum().backward()
        assert float(pool.readout.weights.std()) > 0
        pool.reset_parameters()
        assert float(pool.readout.weights.std()) == 0

    def test_side_by_side(self):
        """The authors' current embedding: slices weighted by duals beside a learned map over points, M + L numbers."""
        tokens = draw(0, 4, 9, 3)
        pool = SWEPool(3, 5, 7, Concat(DualWeighted(5), MapPoints(7))).double()
        assert pool.out_dim == 12
        with pytest.raises(TypeError, match=r"expected readouts to concatenate .* but got 'flatten'"):
            Concat("flatten")
        z = self.z(pool, tokens)
        expected = torch.cat([z.mean(1), torch.einsum("blm,m->bl", z, pool.readout.readouts[1].map.weight[0])], 1)
        torch.testing.assert_close(pool(tokens), expected)
