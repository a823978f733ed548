"""The pool under the SWGG bound: optima against a grid, digits end to end, and a backbone in front."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cswe
from cswe.ops import swgg

DOUBLE = torch.float64


def draw(seed, *shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def direction(degrees):
    radians = torch.as_tensor(degrees, dtype=DOUBLE) * math.pi / 180
    return torch.stack([radians.cos(), radians.sin()], -1)


def angle_between(a, b):
    """Angle between two directions without sign, in degrees."""
    difference = abs(a - b) % 180
    return min(difference, 180 - difference)


def pair(seed):
    """Two elongated clouds that disagree about the best direction."""
    x = draw(seed, 40, 2) @ torch.tensor([[2.0, 0.0], [0.6, 0.5]], dtype=DOUBLE)
    y = draw(seed + 1, 40, 2) @ torch.tensor([[0.7, 0.4], [0.0, 1.8]], dtype=DOUBLE) + torch.tensor([1.0, 2.0])
    return x, y


class TestOptimum:
    """Descent on the Lagrangian ends where a grid search over the same relaxed D ends."""

    @pytest.mark.parametrize(("seed", "alpha"), [(0, 10.0), (10, 1.0), (0, 0.1)])
    def test_with_slack(self, seed, alpha):
        x, y = pair(seed)
        relaxation = cswe.SoftSort(0.5)
        wanted = direction(70.0)  # the loss alone asks for this direction

        def loss_of(theta):
            return 1 - (nn.functional.normalize(theta, dim=-1) @ wanted).square()

        grid = direction(torch.arange(0, 180, 0.05))
        values = swgg(x.unsqueeze(0), y, grid, relaxation)[0]
        bound = float(values.min() + 0.15 * (values.max() - values.min()))
        penalised = loss_of(grid) + alpha / 2 * (values - bound).clamp(min=0).square()
        best = float(penalised.argmin()) * 0.05

        # Several starts at once: slices do not see each other.
        theta = direction([10.0, 50.0, 90.0, 130.0, 170.0]).requires_grad_()
        constraint = cswe.Constraint(lambda: swgg(x.unsqueeze(0), y, theta, relaxation)[0], bound, name="swgg")
        duals = cswe.PrimalDual(constraint, lr=0.03, slack_lr=0.5 / max(alpha, 1.0), slack_weight=alpha)
        optimizer = torch.optim.SGD([theta], lr=0.03)
        for _ in range(1500):
            optimizer.zero_grad()
            duals.lagrangian(loss_of(theta).sum()).backward()
            optimizer.step()
            duals.step()
        theta = theta.detach()
        values = swgg(x.unsqueeze(0), y, theta, relaxation)[0]
        final = loss_of(theta) + alpha / 2 * (values - bound).clamp(min=0).square()
        chosen = int(final.argmin())
        degrees = math.degrees(math.atan2(*theta[chosen].flip(0).tolist()))
        record = duals.record()["swgg"]
        assert angle_between(degrees, best) < 1
        assert float((record["slack"] - record["dual"] / alpha)[chosen].abs()) < 1e-3
        assert float(final[chosen]) <= float(penalised.min()) + 1e-3


class TestReferenceMeetsTheBoundAlone:
    def test_unless_it_is_held(self):
        torch.manual_seed(0)
        tokens = 3 * draw(0, 16, 20, 8, dtype=torch.float32)
        for wrt, moves in (("both", True), ("slices", False)):
            pool = cswe.SWEPool(8, 4, 20)
            bound = cswe.SWGGBound(pool, 1.0, wrt=wrt)
            bound(tokens).sum().backward()
            assert (pool.reference.grad is not None) == moves
            assert float(pool.slicer.weight.grad.abs().max()) > 0


def test_the_multiplier_can_see_the_exact_values():
    pool = cswe.SWEPool(8, 4, 20)
    tokens, mask = draw(0, 5, 12, 8, dtype=torch.float32), torch.arange(12) < torch.tensor([[12], [3], [5], [1], [9]])
    exact = swgg(tokens, pool.reference, pool.slicer.weight, x_mask=mask).mean(0)
    for dual_on, expected in (("hard", exact), ("soft", cswe.SWGGBound(pool, 1.0)(tokens, mask))):
        duals = cswe.PrimalDual(cswe.SWGGBound(pool, 0.5, dual_on=dual_on), lr=0.1)
        duals.lagrangian(torch.zeros(()), tokens, mask).backward()
        duals.step()
        torch.testing.assert_close(
            duals.record()["swgg"]["dual"], 0.1 * (expected - 0.5).detach(), rtol=1e-4, atol=1e-5
        )


def digits():
    """Scikit-learn's digits as sets of inked pixels: (row, column, ink), 8 to 40 points each."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    tokens = torch.stack([(rows - 3.5) / 2, (columns - 3.5) / 2], -1).reshape(1, 64, 2).expand(len(images), -1, -1)
    ink = images.reshape(-1, 64)
    return torch.cat([tokens, ink.unsqueeze(-1) / 8 - 1], -1), ink > 0, torch.tensor(data.target)


def test_digits_end_to_end():
    """D starts above the bound, the multiplier rises, and at the end D ≤ ε + s, with the reference held."""
    torch.manual_seed(0)
    tokens, mask, labels = (part[:600] for part in digits())
    pool = cswe.SWEPool(3, 8, 24, "moments:4")
    head = nn.Linear(pool.out_dim, 10)
    bound = cswe.SWGGBound(pool, bound=cswe.Fraction(0.95, batches=3), wrt="slices")
    duals = cswe.PrimalDual(bound, lr=0.05, slack_lr=0.05, slack_weight=0.5)
    optimizer = torch.optim.Adam([*pool.parameters(), *head.parameters()], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    start = bound(tokens, mask).detach()
    seen, losses = [], []
    for epoch in range(50):
        order = torch.randperm(600, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(100):
            optimizer.zero_grad()
            loss = F.cross_entropy(head(pool(tokens[batch], mask[batch])), labels[batch])
            duals.lagrangian(loss, tokens[batch], mask[batch]).backward()
            optimizer.step()
            duals.step()
            losses.append(float(loss.detach()))
            seen.append(duals.record()["swgg"]["dual"].clone())
        schedule.step()
    record, end = duals.record()["swgg"], bound(tokens, mask).detach()
    assert bool((start > record["bound"]).all()), "the bound should ask for something"
    assert bool((torch.stack(seen).amax(0) > 0).all())
    # With slack an active bound ends at equality; what remains is the noise of the last batches, 0.2 % of D.
    assert bool((end <= (record["bound"] + record["slack"]) * 1.002).all()), (end, record)
    assert float(end.mean()) < float(start.mean())
    assert losses[-1] < 0.5 * losses[0]


class TinyBackbone(nn.Module):
    """Patches to tokens, with one attention block, as a ViT does."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(12, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, patches):
        return self.block(self.patch(patches))


@pytest.mark.parametrize("readout", ["moments:4", "flatten"])
def test_gradients_reach_a_backbone(readout):
    """One optimiser step on backbone, pool and head lowers both the loss and the violation."""
    torch.manual_seed(0)
    patches, labels = draw(0, 24, 9, 12, dtype=torch.float32), torch.arange(24) % 3
    backbone, pool = TinyBackbone(), cswe.SWEPool(16, 6, 9, readout)
    head = nn.Linear(pool.out_dim, 3)
    bound = cswe.SWGGBound(pool, bound=2.0)
    duals = cswe.PrimalDual(bound, lr=1.0, slack_weight=None)

    def measure():
        with torch.no_grad():
            tokens = backbone(patches)
            return float(F.cross_entropy(head(pool(tokens)), labels)), float((bound(tokens) - 2).clamp(min=0).sum())

    # Let the multiplier see the violation once, so that the next step answers to it.
    duals.lagrangian(torch.zeros(()), backbone(patches).detach()).backward()
    duals.step()
    modules = nn.ModuleList([backbone, pool, head])
    modules.zero_grad()
    before = measure()
    tokens = backbone(patches)
    duals.lagrangian(F.cross_entropy(head(pool(tokens)), labels), tokens).backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in backbone.parameters())
    torch.optim.SGD(modules.parameters(), lr=0.005).step()
    after = measure()
    assert after[0] < before[0]
    assert after[1] < before[1]


def train(steps, micro_batches=1, checkpointed=False, evaluate=False):
    torch.manual_seed(0)
    pool = cswe.SWEPool(5, 4, 9, readout="flatten").double()
    head = nn.Linear(pool.out_dim, 3).double()
    bound = cswe.SWGGBound(pool, bound=1.5, relaxation=cswe.SoftSort(0.3))
    duals = cswe.PrimalDual(bound, lr=0.1, slack_lr=0.1, slack_weight=1.0)
    optimizer = torch.optim.SGD([*pool.parameters(), *head.parameters()], lr=0.05)

    def forward(tokens, labels):
        return F.cross_entropy(head(pool(tokens)), labels)

    for step in range(steps):
        tokens, labels = draw(step, 8, 11, 5), torch.arange(8) % 3
        for part, targets in zip(tokens.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            if evaluate:
                with torch.no_grad():
                    duals.lagrangian(forward(part, targets), part)
            if checkpointed:
                loss = torch.utils.checkpoint.checkpoint(
                    lambda part, targets: duals.lagrangian(forward(part, targets), part),
                    part,
                    targets,
                    use_reentrant=False,
                )
            else:
                loss = duals.lagrangian(forward(part, targets), part)
            (loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        duals.step()
    record = duals.record()["swgg"]
    return [record["dual"], record["slack"], pool.slicer.weight.detach(), pool.reference.detach(), head.weight.detach()]


@pytest.mark.parametrize("change", [{"checkpointed": True}, {"evaluate": True}, {"micro_batches": 4}], ids=str)
def test_what_must_not_move_the_multiplier(change):
    plain, other = train(6), train(6, **change)
    assert float(plain[0].abs().max()) > 0
    for a, b in zip(plain, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
