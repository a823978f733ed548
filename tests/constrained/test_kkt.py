"""Convergence to points that are known exactly.

The problem of one angle: minimise f = 1 - cos(φ - 1.2) subject to D = 2 - cos φ <= 1.1. Without slack the solution is
φ = arccos 0.9 and λ = sin(1.2 - φ) / sin φ; with slack it minimises f + (α/2) [D - 1.1]₊².
"""

import math
import warnings

import pytest
import torch

from cswe.constrained import Constraint, InfeasibleBoundWarning, PrimalDual

BOUND = 1.1


def stationary(slack_weight):
    """The root of the penalised objective's slope between the bound's angle and the loss's optimum, by bisection."""
    low, high = math.acos(2 - BOUND), 1.2
    for _ in range(100):
        angle = (low + high) / 2
        slope = math.sin(angle - 1.2) + slack_weight * (2 - math.cos(angle) - BOUND) * math.sin(angle)
        low, high = (angle, high) if slope < 0 else (low, angle)
    return math.degrees(angle)


def solve(duals_of, start=0.0, steps=1000, bound=BOUND, epoch_length=None, **settings):
    angle = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    duals = duals_of(Constraint(lambda: 2 - angle.cos(), bound=bound, name="angle"), **settings)
    optimizer = torch.optim.SGD([angle], lr=0.1)
    for step in range(steps):
        duals.lagrangian(1 - (angle - 1.2).cos()).backward()
        optimizer.step()
        optimizer.zero_grad()
        duals.step()
        if epoch_length and (step + 1) % epoch_length == 0:
            duals.next_epoch()
    entry = duals.record()["angle"]
    return math.degrees(angle.item()), entry["dual"].item(), entry["slack"].item(), duals


@pytest.mark.parametrize("start", [0.0, 0.7, 1.4])
def test_without_slack(start):
    degrees, dual, slack, _ = solve(PrimalDual, start, steps=1500, lr=0.1)
    assert degrees == pytest.approx(25.84, abs=0.1)
    assert degrees == pytest.approx(math.degrees(math.acos(0.9)), abs=1e-4)
    assert dual == pytest.approx(1.5621, abs=1e-3)
    assert slack == 0


@pytest.mark.parametrize(("slack_weight", "expected"), [(10.0, 36.1), (1.0, 54.1), (0.1, 66.2)])
def test_with_slack(slack_weight, expected):
    degrees, dual, slack, _ = solve(
        PrimalDual, steps=700, lr=0.1, slack_lr=min(1.0, 0.5 / slack_weight), slack_weight=slack_weight
    )
    assert degrees == pytest.approx(expected, abs=0.1)
    assert degrees == pytest.approx(stationary(slack_weight), abs=1e-3)
    assert abs(slack - dual / slack_weight) < 1e-3
    assert slack == pytest.approx(2 - math.cos(math.radians(degrees)) - BOUND, abs=1e-3)


@pytest.mark.parametrize("dual_optimizer", ["projected", "adam"])
def test_adam_with_projection(dual_optimizer):
    degrees, dual, slack, _ = solve(
        PrimalDual,
        steps=1500,
        lr=0.05,
        slack_lr=0.05,
        slack_weight=1.0,
        slack_optimizer="adam",
        dual_optimizer=dual_optimizer,
        schedule=0.7 if dual_optimizer == "adam" else None,
        slack_schedule=0.7,
        epoch_length=100,
    )
    assert degrees == pytest.approx(54.1, abs=0.1)
    assert abs(slack - dual) < 1e-3


def test_inactive_bound_leaves_the_loss_alone():
    degrees, dual, _, _ = solve(PrimalDual, lr=0.1, steps=500, bound=3.0)
    assert degrees == pytest.approx(math.degrees(1.2), abs=1e-6)
    assert dual == 0


def test_solvable_bound_is_not_called_out_of_reach():
    with warnings.catch_warnings():
        warnings.simplefilter("error", InfeasibleBoundWarning)
        # A slow rise: the multiplier grows during the first thousand steps, but with effect.
        solve(PrimalDual, start=1.2, steps=1500, lr=0.01, patience=100)


def test_bound_out_of_reach_is_said_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        degrees, dual, _, _ = solve(PrimalDual, start=1.0, steps=1500, lr=0.1, bound=0.9, patience=200)
    messages = [str(warning.message) for warning in caught if warning.category is InfeasibleBoundWarning]
    assert len(messages) == 1
    assert "'angle'" in messages[0]
    assert "above 0.9" in messages[0]
    assert caught[0].filename == __file__
    # The nearest that there is, and a multiplier that grows with every step, 0.1 (1 - 0.9) each.
    assert abs(degrees) < 5
    assert dual > 14


def test_several_constraints_of_different_sizes():
    # The point of {x <= (0.5, 2, 2), sum x <= 2} nearest to (1, 1, 1.5) is (0.5, 0.5, 1): λ = 2 (y - x) - μ.
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1.0, 1.0, 1.5], dtype=torch.float64)
    optimizer = torch.optim.SGD([x], lr=0.05)
    each = Constraint(lambda: x * 1.0, bound=[0.5, 2.0, 2.0], name="each")
    together = Constraint(lambda: x.sum(), bound=2.0, name="together", lr=0.1)
    duals = PrimalDual([each, together], lr=0.2)
    for _ in range(1000):
        duals.lagrangian((x - target).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        duals.step()
    # y - (2, 1, 1)-split of the excess: x1 = 0.5, the rest of the sum, 1.5, is shared as (0.5, 1.0).
    assert torch.allclose(x.detach(), torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64), atol=1e-6)
    record = duals.record()
    assert record["together"]["dual"].item() == pytest.approx(1.0, abs=1e-5)  # 2 (1 - 0.5)
    assert record["each"]["dual"].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-5)  # 2 (1 - 0.5) - 1 = 0


def test_overrides_of_one_constraint():
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    soft = Constraint(lambda: x[0], bound=1.0, name="soft", slack_weight=4.0)
    hard = Constraint(lambda: x[1], bound=1.0, name="hard", slack_weight=float("inf"))
    duals = PrimalDual([soft, hard], lr=0.1, slack_lr=0.1, slack_weight=100.0, slack_optimizer="projected")
    for _ in range(1000):
        duals.lagrangian((x - 2).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        duals.step()
    # soft: (x - 2)² + 2 [x - 1]² has its minimum at 4/3.
    assert x.tolist() == pytest.approx([4 / 3, 1.0], abs=1e-6)
    assert duals.record()["hard"]["slack"].item() == 0
