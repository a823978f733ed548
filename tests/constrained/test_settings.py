"""Bounds, schedules, rules and the words when something is wrong."""

import fractions
import math
import warnings

import pytest
import torch
from torch import nn

from cswe.constrained import Constraint, Fraction, InfeasibleBoundWarning, PrimalDual, ProjectedAdam
from cswe.constrained.rules import as_rule


def run(values, **settings):
    """Feed given values of one constraint, without a model; weights of the batches are their leading sizes."""
    knob = torch.zeros((), dtype=torch.float64, requires_grad=True)
    constraint = Constraint(lambda batch: batch.mean(0) + knob, settings.pop("bound"), name="fed")
    duals = PrimalDual(constraint, **settings)
    for batch in values:
        duals.lagrangian(knob * 0, torch.as_tensor(batch, dtype=torch.float64)).backward()
        duals.step()
        yield duals


def test_fraction_is_measured_and_then_binds():
    batches = [[[4.0, 8.0]], [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], [[3.0, 3.0]], [[1.0, 3.0]]]
    entries = [duals.record()["fed"] for duals in run(batches, bound=Fraction(0.5, batches=2), lr=1.0)]
    for entry in entries[:2]:
        assert entry["dual"].tolist() == [0.0, 0.0]
    assert "bound" not in entries[0]
    # The level is the mean over samples, (4 + 3·1)/4 and (8 + 3·2)/4.
    assert entries[1]["bound"].tolist() == pytest.approx([0.875, 1.75])
    assert entries[2]["dual"].tolist() == pytest.approx([3 - 0.875, 3 - 1.75])
    assert entries[3]["bound"].tolist() == pytest.approx([0.875, 1.75])  # measured once


def test_fraction_contributes_nothing_while_measuring():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    duals = PrimalDual(Constraint(lambda: x * 3, Fraction(0.9, batches=2), "x"), lr=1.0, slack_weight=1.0)
    for _ in range(2):
        loss = duals.lagrangian(x.sum())
        loss.backward()
        assert loss.item() == 3.0
        assert x.grad.tolist() == [1.0, 1.0]
        x.grad = None
        duals.step()
        assert duals.record()["x"]["slack"].tolist() == [0.0, 0.0]
    duals.lagrangian(x.sum()).backward()
    duals.step()
    assert duals.record()["x"]["dual"].tolist() == pytest.approx([0.3, 0.6])


def test_fraction_counts_steps_and_not_micro_batches():
    x = torch.tensor(1.0, requires_grad=True)
    duals = PrimalDual(Constraint(lambda b: x * b.mean(), Fraction(1.0, batches=1), "x"), lr=1.0)
    for size, level in [(3, 1.0), (1, 5.0)]:
        duals.lagrangian(x * 0, torch.full((size,), level)).backward()
    assert duals.record() == {}
    duals.step()
    assert duals.record()["x"]["bound"].item() == 2.0


@pytest.mark.parametrize("bound", [2, 2.0, fractions.Fraction(2), torch.tensor(2.0), [2.0, 2.0], torch.full((2,), 2.0)])
def test_forms_of_a_bound(bound):
    (duals,) = run([[[5.0, 1.0]]], bound=bound, lr=1.0)
    assert duals.record()["fed"]["dual"].tolist() == [3.0, 0.0]


def test_schedules_of_the_paper():
    # Slack × 0.1 at epoch 60 with the dual unaffected; both × 0.95 per epoch.
    images = PrimalDual(
        Constraint(lambda: None, 1.0, "x"), lr=0.5, slack_lr=0.2, slack_weight=1.0, slack_schedule={60: 0.1}
    )
    proteins = PrimalDual(
        Constraint(lambda: None, 1.0, "x"), lr=0.5, slack_lr=0.2, slack_weight=1.0, schedule=0.95, slack_schedule=0.95
    )
    for epoch in range(100):
        assert images.rates == pytest.approx((0.5, 0.02 if epoch >= 60 else 0.2))
        assert proteins.rates == pytest.approx((0.5 * 0.95**epoch, 0.2 * 0.95**epoch))
        images.next_epoch()
        proteins.next_epoch()


def test_schedule_reaches_the_step_and_rates_may_be_set():
    expected = 0.0
    for i, duals in enumerate(run([[3.0]] * 6, bound=1.0, lr=0.5, schedule=lambda epoch: 1 / (1 + epoch))):
        expected += (0.5 if i < 4 else 0.25) / (1 + i) * 2
        assert duals.record()["fed"]["dual"].item() == pytest.approx(expected)
        duals.next_epoch()
        if i == 3:
            duals.lr = 0.25


def test_slack_has_its_own_schedule():
    feed = run([[3.0]] * 3, bound=1.0, lr=1.0, slack_lr=0.5, slack_weight=1.0, slack_schedule={1: 0.1})
    for duals, slack, dual in zip(feed, (0.0, 0.1, 0.29), (2.0, 3.9, 5.61), strict=True):
        # λ by 1 (3 - 1 - s) throughout; s by 0.05 (λ - s) from the second step on
        assert duals.record()["fed"]["slack"].item() == pytest.approx(slack)
        assert duals.record()["fed"]["dual"].item() == pytest.approx(dual)
        duals.next_epoch()


def test_adam_equals_torch_adam_with_projection():
    gradients = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rule = ProjectedAdam(betas=(0.8, 0.95), eps=1e-6)
    point = torch.full((3,), 0.02, dtype=torch.float64)
    memory = rule.start(point)
    theirs = point.clone().requires_grad_()
    adam = torch.optim.Adam([theirs], lr=0.02, betas=(0.8, 0.95), eps=1e-6)
    touched = False
    for gradient in gradients:
        point, memory = rule.move(point, gradient, 0.02, memory)
        theirs.grad = gradient.clone()
        adam.step()
        with torch.no_grad():
            theirs.clamp_(min=0)
        touched |= bool((point == 0).any())
        assert torch.allclose(point, theirs, rtol=0, atol=1e-13)
    assert touched


@pytest.mark.parametrize(
    ("values", "settings", "warns"),
    [
        ([3.0] * 8, {}, True),
        ([3.0, 3.0, 3.0, 2.99] * 2, {}, True),  # less than 1 % down is not on its way down
        ([3.0, 3.0, 2.9, 2.9] * 2, {}, False),
        ([3.0, 0.5, 3.0, 0.5] * 2, {}, False),  # it falls between
        ([3.0] * 3 + [0.5] + [3.0] * 3, {}, False),  # a whole window is needed
        ([0.5] * 8, {}, False),
        # Slack absorbs what cannot be met, even while it moves so slowly that nothing shrinks yet.
        ([3.0] * 8, {"slack_lr": 1e-6, "slack_weight": 1.0}, False),
        ([3.0] * 8, {"patience": None}, False),
    ],
)
def test_when_a_bound_is_called_out_of_reach(values, settings, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(run([[value] for value in values], **({"bound": 1.0, "lr": 0.1, "patience": 4} | settings)))
    assert [warning.category for warning in caught] == [InfeasibleBoundWarning] * warns


def test_module_and_function_are_constraints():
    class Level(nn.Module):
        def forward(self):
            return torch.ones(2)

    def level():
        return torch.ones(2)

    assert Constraint(Level(), 1.0).name == "Level"
    assert Constraint(level, 1.0).name == "level"
    assert Constraint(lambda: None, 1.0).name == "constraint"
    module = Level()
    module.bound, module.name, module.slack_weight = [1.0, 2.0], "mine", 3.0
    duals = PrimalDual(module, lr=0.1)
    assert duals.constraints[0].name == "mine"
    assert duals.constraints[0].slack_weight == 3.0


def test_words_for_a_reader():
    feed = run([[[1.0, 3.0]]] * 3, bound=Fraction(0.5, batches=2), lr=1.0)
    duals = next(feed)
    assert "fed: 2 values, measuring its level, 1 of 2 batches" in duals.summary()
    *_, duals = feed
    assert "fed: 2 values, 2 above bound" in duals.summary()
    assert "dual   1 (from 0.5 to 1.5)" in duals.summary()
    assert "slack" not in duals.summary()
    assert repr(duals).startswith("PrimalDual([Constraint('fed', bound=Fraction(fraction=0.5, batches=2))], lr=1,")
    (duals,) = run([[[1.0, 3.0]]], bound=2.0, lr=1.0)
    assert "bound  2\n" in duals.summary()
    assert "not seen yet" in PrimalDual(Constraint(lambda: None, 1.0), lr=1).summary()


def ones(*shape):
    return lambda *_: torch.ones(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Constraint(3, 1.0), TypeError, "function to be callable but got 3"),
        (lambda: Constraint(ones(1), "low", "c"), TypeError, "bound of constraint 'c' .* but got 'low'"),
        (lambda: Constraint(ones(1), None, "c"), TypeError, "bound of constraint 'c' .* but got None"),
        (lambda: Constraint(ones(1), float("nan"), "c"), ValueError, "bound of constraint 'c' .* finite .* nan"),
        (lambda: Constraint(ones(1), [1, math.inf], "c"), ValueError, "bound of constraint 'c' to be finite"),
        (lambda: Constraint(ones(1), torch.ones(2, 2), "c"), ValueError, r"bound .* got shape \(2, 2\)"),
        (lambda: Constraint(ones(1), 1.0, "a.b"), ValueError, "name .* without '.' but got 'a.b'"),
        (lambda: Constraint(ones(1), 1.0, 7), TypeError, "name to be a string but got 7"),
        (lambda: Constraint(ones(1), 1.0, "c", lr=-1), ValueError, "lr of constraint 'c' .* at least 0 but got -1"),
        (lambda: Fraction(0), ValueError, "fraction to be positive but got 0"),
        (lambda: Fraction(0.9, batches=0), ValueError, "batches to be at least 1 but got 0"),
        (lambda: Fraction(0.9, batches=1.5), TypeError, "batches to be an integer but got 1.5"),
        (lambda: PrimalDual([], lr=1), ValueError, "constraints .* got none"),
        (lambda: PrimalDual(ones(1), lr=1), TypeError, "constraints .* attribute 'bound' but got <function"),
        (lambda: PrimalDual([Constraint(ones(1), 1), Constraint(ones(1), 1)], lr=1), ValueError, "names .* differ"),
        (lambda: PrimalDual(Constraint(ones(1), 1), lr="fast"), TypeError, "lr to be a number but got 'fast'"),
        (lambda: PrimalDual(Constraint(ones(1), 1), lr=-1), ValueError, "lr to be at least 0 but got -1"),
        (lambda: PrimalDual(Constraint(ones(1), 1), 1, slack_lr=1), ValueError, "slack_weight with slack_lr=1"),
        (lambda: PrimalDual(Constraint(ones(1), 1), 1, 1, -1), ValueError, "slack_weight to be at least 0 but got -1"),
        (lambda: PrimalDual(Constraint(ones(1), 1), 1, 0.5, 4), ValueError, r"below 2, .* but got 0.5 \* 4"),
        (lambda: PrimalDual(Constraint(ones(1), 1), 1, patience=1), ValueError, "patience .* at least 2, .* got 1"),
        (lambda: PrimalDual(Constraint(ones(1), 1), 1, schedule={"60": 0.1}), TypeError, "keys of schedule .* '60'"),
        (lambda: PrimalDual(Constraint(ones(1), 1), 1, schedule=-0.1), ValueError, "schedule to be at least 0"),
        (lambda: as_rule("sgd", "slack_optimizer"), ValueError, "slack_optimizer to be 'projected', .* got 'sgd'"),
        (lambda: as_rule(3, "dual_optimizer"), TypeError, "dual_optimizer to be 'projected', .* got 3"),
        (lambda: ProjectedAdam(betas=(0.9, 1.0)), ValueError, r"betas\[1\] .* got 1.0"),
    ],
)
def test_wrong_settings_say_what_was_expected(make, error, words):
    with pytest.raises(error, match=words):
        make()


def total(*constraints):
    return PrimalDual(constraints, lr=1.0)


LOSS = torch.zeros((), requires_grad=True)
BATCH = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda: total(Constraint(ones(1), 1)).lagrangian(torch.ones(3)), ValueError, r"loss .* shape \(3,\)"),
        (lambda: total(Constraint(ones(1), 1)).lagrangian(0.5), ValueError, "loss to be a scalar tensor but got 0.5"),
        (lambda: total(Constraint(ones(4, 2), 1, "c")).lagrangian(LOSS), ValueError, r"'c' .*\(K,\).* got \(4, 2\)"),
        (lambda: total(Constraint(ones(0), 1, "c")).lagrangian(LOSS), ValueError, r"'c' .* got \(0,\)"),
        (lambda: total(Constraint(lambda: 3.0, 1, "c")).lagrangian(LOSS), TypeError, "'c' to be a tensor but got 3.0"),
        (
            lambda: total(Constraint(lambda: torch.ones(1, dtype=torch.int), 1, "c")).lagrangian(LOSS),
            TypeError,
            "'c' to be real but got torch.int32",
        ),
        (
            lambda: total(Constraint(ones(3), [1, 2], "c")).lagrangian(LOSS),
            ValueError,
            "expected 2 values of constraint 'c', one for each number of its bound, but got 3",
        ),
        (
            lambda: total(Constraint(ones(3), 1, "c")).lagrangian(LOSS, (BATCH, BATCH)),
            TypeError,
            "first input of constraint 'c' .* got tuple: give the constraint count=",
        ),
        (
            lambda: total(Constraint(ones(3), 1, "c", dual_values=ones(2))).lagrangian(LOSS, BATCH),
            ValueError,
            r"dual_values of constraint 'c' to have shape \(3,\), .* but got \(2,\)",
        ),
        (
            lambda: total(Constraint(ones(3), 1, "c", count=lambda _: -1)).lagrangian(LOSS, BATCH),
            ValueError,
            "count of constraint 'c' to be at least 0 but got -1",
        ),
        (lambda: total(Constraint(ones(3), 1, "c")).step(True), TypeError, r"step\(skipped=True\)"),
        (lambda: total(Constraint(ones(3), 1, "c")).step(), RuntimeError, r"'c': no lagrangian\(...\) was diff"),
    ],
)
def test_wrong_use_says_what_was_expected(act, error, words):
    with pytest.raises(error, match=words):
        act()


def test_values_that_change_in_number():
    duals = next(run([[[1.0, 3.0]]], bound=1.0, lr=1.0))
    with pytest.raises(ValueError, match="expected 2 values of constraint 'fed', as in the steps before, but got 3"):
        duals.lagrangian(LOSS, torch.ones(1, 3))


def fed(x, duals, *rows):
    for row in rows:
        duals.lagrangian(x.sum(), torch.tensor([row])).backward()
        duals.step()


def test_looks_now_and_then():
    x = torch.ones(2, requires_grad=True)
    duals = PrimalDual(Constraint(lambda b: x * b.mean(0), 0.5, "fed"), lr=1.0, look_every=3)
    fed(x, duals, [1.0, 1.0], [1.0, float("nan")])
    spoilt = "constraint 'fed' but got nan at index 1 .1 of 2 not finite.; slacks and multipliers may be spoilt"
    with pytest.raises(FloatingPointError, match=spoilt):
        duals.check()
    with pytest.raises(FloatingPointError, match=spoilt):  # by the multiplier: the values are finite again
        fed(x, duals, [1.0, 1.0])
    assert duals.steps == 2


def test_looks_only_when_asked():
    x = torch.ones(2, requires_grad=True)
    duals = PrimalDual(Constraint(lambda b: x * b.mean(0), 0.5, "fed"), lr=1.0, look_every=None)
    duals.check()  # nothing has been seen yet
    fed(x, duals, [1.0, 1.0])
    duals.check()
    fed(x, duals, *[[1.0, float("inf")]] * 5)
    with pytest.raises(FloatingPointError, match="got inf at index 1"):
        duals.check()


def test_looking_changes_nothing():
    def end(look_every):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        duals = PrimalDual(
            Constraint(lambda b: x * b.mean(0), 0.5, "fed"), 0.1, slack_weight=1.0, look_every=look_every
        )
        fed(x, duals, [1.0, 2.0], [0.5, 3.0], [2.0, 0.1])
        return duals.state_dict()

    first, *others = (end(look_every) for look_every in (1, 2, None))
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)


@pytest.mark.parametrize("wrong", [0, 1.5, True, "often"])
def test_looks_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=f"look_every to be an integer of at least 1, or None, but got {wrong!r}"):
        PrimalDual(Constraint(lambda b: b.mean(0), 0.5, "fed"), lr=1.0, look_every=wrong)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite(bad):
    x = torch.ones(2, requires_grad=True)
    good = Constraint(lambda b: x * 2, 1.0, "good")
    broken = Constraint(lambda b: x * b.mean(0), 0.5, "broken")
    duals = PrimalDual([good, broken], lr=1.0)
    duals.lagrangian(x.sum(), torch.ones(3, 2)).backward()
    duals.step()
    before = duals.state_dict()
    duals.lagrangian(x.sum(), torch.tensor([[1.0, bad]])).backward()
    with pytest.raises(FloatingPointError, match=f"constraint 'broken' but got {bad} at index 1 \\(1 of 2"):
        duals.step()
    after = duals.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    # The bad values are gone: training may go on.
    duals.lagrangian(x.sum(), torch.ones(3, 2)).backward()
    duals.step()
    assert duals.steps == 2


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_mixed_precision_leaves_the_multipliers_alone(half):
    w = torch.tensor([1.0, 1.0], requires_grad=True)
    constraint = Constraint(lambda: w.square(), bound=[0.9, 0.93], name="c")
    duals = PrimalDual(constraint, lr=15.0, slack_lr=1.0, slack_weight=0.3)
    duals.lagrangian(w.sum() * 0).backward()
    duals.step()
    dual, totals, slopes = duals.record()["c"]["dual"], [], []
    for enabled in (False, True):
        w.grad = None
        with torch.autocast("cpu", dtype=half, enabled=enabled):
            total = duals.lagrangian(torch.zeros(()))
        (total * 65536).backward()  # as a GradScaler begins
        totals.append(total.detach())
        slopes.append(w.grad / 65536)
    assert torch.equal(*totals)
    assert torch.equal(*slopes)
    torch.testing.assert_close(slopes[1], 2 * dual)


def test_a_list_of_bounds_is_not_rounded():
    assert Constraint(lambda: torch.zeros(2), bound=[0.1, 0.7]).bound.tolist() == [0.1, 0.7]
