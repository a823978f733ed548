"""What moves the multipliers, and what must not."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cswe.constrained import Constraint, PrimalDual

EXACT = 1e-10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(3, 5).double()
        self.head = nn.Linear(5, 1).double()
        self.checkpointed = False
        self.reentrant = False

    def forward(self, x):
        if self.checkpointed:
            return self.head(checkpoint(self.features, x, use_reentrant=self.reentrant))
        return self.head(self.features(x))

    def features(self, x):
        return self.hidden(x).tanh()


def data(step, samples=12):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def setup(**settings):
    net = Net()
    # Above the bound for some values and below it for others, so that projection matters.
    power = Constraint(lambda x, y: net.features(x).square().mean(0), bound=0.2, name="power")
    settings = {"lr": 0.3, "slack_lr": 0.2, "slack_weight": 1.0} | settings
    duals = PrimalDual(power, **settings)
    return net, duals, torch.optim.SGD(net.parameters(), lr=0.1)


def train(micro_batches=(12,), wrap=None, also=None, steps=20, **settings):
    net, duals, optimizer = setup(**settings)
    if wrap == "features":
        net.checkpointed = True
    for step in range(steps):
        x, y = data(step)
        for part, target in zip(x.split(list(micro_batches)), y.split(list(micro_batches)), strict=True):

            def lagrangian(part, target):
                return duals.lagrangian((net(part) - target).square().mean(), part, target)

            if wrap in ("reentrant", "nonreentrant"):
                part = part.requires_grad_()  # reentrant checkpointing needs an input with a gradient
                loss = checkpoint(lagrangian, part, target, use_reentrant=wrap == "reentrant")
            else:
                loss = lagrangian(part, target)
            (loss * (len(part) / 12)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if also:
            also(net, duals, step)
        duals.step()
    return net, duals


def assert_same(one, other):
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=EXACT)
    first, second = one[1].record()["power"], other[1].record()["power"]
    for key in ("dual", "slack", "values"):
        assert torch.allclose(first[key], second[key], rtol=0, atol=EXACT), key
    assert first["dual"].max() > 0.01  # or there was nothing to compare


@pytest.mark.parametrize("settings", [{}, {"slack_optimizer": "adam", "dual_optimizer": "adam"}])
@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (1, 5, 4, 2)])
def test_micro_batches_equal_one_batch(sizes, settings):
    assert_same(train(**settings), train(sizes, **settings))


@pytest.mark.parametrize("wrap", ["features", "reentrant", "nonreentrant"])
@pytest.mark.parametrize("sizes", [(12,), (1, 5, 4, 2)])
def test_checkpointing(wrap, sizes):
    assert_same(train(), train(sizes, wrap=wrap))


def test_one_checkpointed_micro_batch_counts_once():
    # All micro-batches counted twice would have the right mean; one of them would not.
    net, duals, _ = setup()
    (a, ya), (b, yb) = data(0, 4), data(1, 4)
    checkpoint(lambda x, y: duals.lagrangian(net(x).mean(), x, y), a, ya, use_reentrant=False).backward()
    duals.lagrangian(net(b).mean(), b, yb).backward()
    duals.step()
    both = net.features(torch.cat([a, b])).square().mean(0)
    assert torch.allclose(duals.record()["power"]["values"], both, rtol=0, atol=EXACT)


def test_evaluation_does_not_count():
    def evaluate(net, duals, step):
        x, y = data(1000 + step, 7)
        net.train()
        duals.lagrangian((net(x) - y).square().mean(), x, y)  # train mode, gradients on, never differentiated
        with torch.no_grad():
            duals.lagrangian((net(x) - y).square().mean(), x, y)
        with torch.inference_mode():
            duals.lagrangian((net(x) - y).square().mean(), x, y)

    assert_same(train(), train(also=evaluate))


def test_second_backward_counts_once():
    net, duals, _ = setup()
    (a, ya), (b, yb) = data(0, 4), data(1, 4)
    loss = duals.lagrangian(net(a).mean(), a, ya)
    loss.backward(retain_graph=True)
    loss.backward()
    duals.lagrangian(net(b).mean(), b, yb).backward()
    duals.step()
    both = net.features(torch.cat([a, b])).square().mean(0)
    assert torch.allclose(duals.record()["power"]["values"], both, rtol=0, atol=EXACT)


def test_lagrangian_value_and_gradient():
    net, duals = train(steps=5)
    x, y = data(7)
    before = duals.record()["power"]
    dual, slack = before["dual"], before["slack"]
    values = net.features(x).square().mean(0)
    expected = (net(x) - y).square().mean() + 0.5 * (slack @ slack) + dual @ (values - 0.2 - slack)
    actual = duals.lagrangian((net(x) - y).square().mean(), x, y)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-14)
    parameters = list(net.parameters())
    for a, b in zip(torch.autograd.grad(actual, parameters), torch.autograd.grad(expected, parameters), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)
    # λ and s moved in the step and in nothing else.
    assert torch.equal(duals.record()["power"]["dual"], dual)


def test_order_is_slack_then_dual():
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    duals = PrimalDual(Constraint(lambda: x, bound=1.0, name="x"), lr=0.5, slack_lr=0.25, slack_weight=2.0)
    for slack, dual in [(0.0, 1.0), (0.25, 1.875), (0.59375, 2.578125)]:
        # s <- [s - 0.25 (2 s - λ)]₊ with the old λ, then λ <- [λ + 0.5 (3 - 1 - s)]₊ with the new s
        duals.lagrangian(x * 0).backward()
        duals.step()
        assert duals.record()["x"]["slack"].item() == slack
        assert duals.record()["x"]["dual"].item() == dual


def test_skipped_step_leaves_all_alone_and_discards():
    def skip(net, duals, step):
        pass

    net, duals = train(also=skip, steps=5)
    before = copy.deepcopy(duals.state_dict())
    x, y = data(50)
    duals.lagrangian(net(x).mean() * float("inf"), x * 1e200, y).backward()
    duals.step(skipped=True)
    after = duals.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.raises(RuntimeError, match="no values of constraint 'power'"):
        duals.step()


def test_grad_scaler_that_skips():
    """A gradient that overflows in one of the steps: the run equals one that never saw that batch."""

    def run(overflow):
        x = torch.tensor([2.0, 0.5], requires_grad=True)
        optimizer = torch.optim.SGD([x], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        duals = PrimalDual(Constraint(lambda _: x * 1.0, bound=1.0, name="x"), lr=0.1)
        skips = 0
        for step in range(8):
            if step == 4 and not overflow:
                continue
            loss = duals.lagrangian((x - 3).square().sum(), x)
            if step == 4:
                loss = loss + x.sum() * float("inf")
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped = scaler.get_scale() < scale
            skips += skipped
            duals.step(skipped=skipped)
        return x.detach(), duals.record()["x"]["dual"], skips

    (x, dual, skips), (expected, expected_dual, _) = run(True), run(False)
    assert skips == 1
    assert torch.equal(x, expected)
    assert torch.equal(dual, expected_dual)


def test_dual_values_move_the_multiplier_but_do_not_enter_the_loss():
    class Hard(nn.Module):
        bound = 0.0
        name = "hard"

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.3, -0.2]))

        def forward(self, x):
            return torch.sigmoid(self.weight)

        def dual_values(self, x):
            assert not torch.is_grad_enabled()
            return (self.weight > 0).float()

        def count(self, x):
            return 5

    hard = Hard()
    duals = PrimalDual(hard, lr=1.0)
    x = torch.zeros(2, 1)
    duals.lagrangian(hard.weight.sum() * 0, x).backward()
    duals.step()
    assert duals.record()["hard"]["dual"].tolist() == [1.0, 0.0]
    loss = duals.lagrangian(hard.weight.sum() * 0, x)
    assert loss.item() == pytest.approx(torch.sigmoid(hard.weight[0]).item())
    assert duals.constraints[0].count(x) == 5


def test_step_with_inputs_evaluates_anew():
    x = torch.tensor(2.0, requires_grad=True)
    duals = PrimalDual(Constraint(lambda scale: (x * scale).mean(), bound=1.0, name="x"), lr=1.0)
    duals.lagrangian(x * 0, torch.ones(1)).backward()
    with torch.no_grad():
        x.fill_(4.0)
    duals.step(torch.ones(1))
    assert duals.record()["x"]["dual"].item() == 3.0
    with pytest.raises(RuntimeError, match="no values"):
        duals.step()  # those of the loss were dropped


def test_empty_micro_batch_does_not_count():
    x = torch.tensor(2.0, requires_grad=True)
    duals = PrimalDual(Constraint(lambda batch: (x * batch).mean(), bound=1.0, name="x"), lr=1.0)
    duals.lagrangian(x * 0, torch.ones(3)).backward()
    duals.lagrangian(x * 0, torch.ones(0)).backward()
    duals.step()
    assert duals.record()["x"]["values"].item() == 2.0


def test_half_precision_values_and_loss():
    x = torch.tensor(2.0, requires_grad=True)
    duals = PrimalDual(Constraint(lambda: x.bfloat16(), bound=1.0, name="x"), lr=1e-4)
    for _ in range(100):
        duals.lagrangian((x * 0).bfloat16()).backward()
        duals.step()
    assert duals.record()["x"]["dual"].dtype == torch.float32
    assert duals.record()["x"]["dual"].item() == pytest.approx(1e-2, rel=1e-4)
