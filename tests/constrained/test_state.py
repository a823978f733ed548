"""Saving and resuming."""

import copy
import json
import pickle
import warnings

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from cswe.constrained import Constraint, Fraction, InfeasibleBoundWarning, PrimalDual

# Windows of five steps, so that a run is saved in the middle of one; with these the warning comes early.
pytestmark = pytest.mark.filterwarnings("ignore::cswe.constrained.InfeasibleBoundWarning")

SETTINGS = {
    "plain": {"lr": 0.05},
    "slack": {"lr": 0.05, "slack_lr": 0.1, "slack_weight": 0.5, "schedule": 0.9, "slack_schedule": {1: 0.5}},
    "adam": {"lr": 0.05, "slack_weight": 0.5, "slack_optimizer": "adam", "dual_optimizer": "adam"},
}


class Run:
    def __init__(self, dtype=torch.float32, bound=None, **settings):
        self.x = torch.tensor([2.0, 0.3, 1.7], dtype=dtype, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.x], lr=0.05)
        bound = Fraction(0.9, batches=4) if bound is None else bound
        level = Constraint(lambda b: (self.x * b.mean(0)).square(), bound, "level")
        total = Constraint(lambda b: self.x.sum(), 1.0, "sum", lr=0.02)
        self.duals = PrimalDual([level, total], patience=5, **settings)

    def steps(self, first, last):
        for step in range(first, last):
            batch = torch.rand(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            self.duals.lagrangian((self.x - 2).square().sum(), batch.to(self.x.dtype)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.duals.step()
            if step % 5 == 4:
                self.duals.next_epoch()
        return self


def through_json(state):
    return json.loads(json.dumps({key: tensor.tolist() for key, tensor in state.items()}))


ROADS = {
    "memory": lambda state: state,
    "safetensors": lambda state: load(save(state)),
    "json": through_json,
}


@pytest.mark.parametrize("at", [2, 13])  # while the level is being measured, and after
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_resumed_run_is_the_same_bit_for_bit(settings, road, at, dtype):
    whole = Run(dtype, **settings).steps(0, 30)
    first = Run(dtype, **settings).steps(0, at)
    second = Run(dtype, **settings)
    with torch.no_grad():
        second.x.copy_(first.x)
    second.duals.load_state_dict(ROADS[road](first.duals.state_dict()))
    first.steps(at, at + 3)  # what was saved is a copy: going on must not change it
    second.steps(at, 30)
    assert torch.equal(second.x, whole.x)
    expected, actual = whole.duals.state_dict(), second.duals.state_dict()
    assert expected.keys() == actual.keys()
    for key in expected:
        assert torch.equal(expected[key], actual[key]), key
        assert expected[key].dtype == actual[key].dtype, key
    assert expected["level.dual"].max() > 0


def test_rates_and_epoch_are_part_of_the_state():
    run = Run(lr=0.1, slack_weight=1.0).steps(0, 7)
    run.duals.lr, run.duals.slack_lr = 0.03, 0.07
    other = Run(lr=0.1, slack_weight=1.0)
    other.duals.load_state_dict(run.duals.state_dict())
    assert (other.duals.lr, other.duals.slack_lr, other.duals.epoch, other.duals.steps) == (0.03, 0.07, 1, 7)


def test_given_bound_is_a_setting_and_not_state():
    run = Run(bound=0.5, lr=0.1).steps(0, 3)
    other = Run(bound=0.7, lr=0.1)
    other.duals.load_state_dict(run.duals.state_dict())
    assert other.duals.record()["level"]["bound"].tolist() == pytest.approx([0.7] * 3)


def test_warning_is_not_repeated_after_resuming():
    def stuck():
        x = torch.ones(1, requires_grad=True)
        return x, PrimalDual(Constraint(lambda: x.square() + 1, 0.5, "x"), lr=0.1, patience=4)

    def steps(x, duals):
        for _ in range(12):
            duals.lagrangian(x.sum() * 0).backward()
            duals.step()

    x, duals = stuck()
    with pytest.warns(InfeasibleBoundWarning, match="'x'") as caught:
        steps(x, duals)
    assert len(caught) == 1
    other_x, other = stuck()
    other.load_state_dict(duals.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(other_x, other)


def test_resuming_with_another_patience():
    run = Run(lr=0.1).steps(0, 3)
    other = Run(lr=0.1)
    other.duals = PrimalDual(other.duals.constraints, lr=0.1, patience=None)
    other.duals.load_state_dict(run.duals.state_dict())
    assert torch.equal(other.duals.record()["sum"]["dual"], run.duals.record()["sum"]["dual"])


def edited(state, **changes):
    state = {**state, **{key.replace("__", "."): value for key, value in changes.items()}}
    return {key: value for key, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"lr": None}, ValueError, r"missing \['lr'\]"),
        ({"other__dual": torch.ones(3)}, ValueError, r"unexpected \['other.dual'\]"),
        ({"level__dual": None}, ValueError, "expected the state to have 'level.dual'"),
        ({"level__slack": None}, ValueError, r"'level' but got one with missing \['level.slack'\]"),
        ({"level__dual__mean": torch.ones(3)}, ValueError, r"unexpected \['level.dual.mean'\]"),
        ({"level__level": torch.ones(2)}, ValueError, r"'level.level' .* shape \(3,\) but got \(2,\)"),
        ({"level__dual": torch.ones(2, 2)}, ValueError, r"'level.dual' .* \(K,\) but got \(2, 2\)"),
        ({"sum__dual": "much"}, TypeError, "'sum.dual' .* tensor or numbers but got 'much'"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(changes, error, words):
    run = Run(lr=0.1, slack_weight=1.0).steps(0, 8)
    before = run.duals.state_dict()
    with pytest.raises(error, match=words):
        run.duals.load_state_dict(edited(Run(lr=0.2, slack_weight=1.0).steps(0, 3).duals.state_dict(), **changes))
    after = run.duals.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_loading_discards_what_was_counted():
    run = Run(lr=0.1).steps(0, 3)
    state = run.duals.state_dict()
    run.duals.lagrangian(run.x.sum(), torch.ones(1, 3)).backward()
    run.duals.load_state_dict(state)
    with pytest.raises(RuntimeError, match="no values"):
        run.duals.step()


def test_state_before_the_first_step():
    run, other = Run(lr=0.1), Run(lr=0.5).steps(0, 8)
    other.duals.load_state_dict(run.duals.state_dict())
    assert other.duals.record() == {}
    assert other.duals.lr == 0.1


class Norm(nn.Module):
    bound = 1.0
    name = "norm"

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor([2.0, 1.0]))

    def forward(self):
        return self.x.square().sum()


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copy_stands_alone(twin_of):
    def steps(norm, duals):
        for _ in range(5):
            duals.lagrangian((norm.x - 3).square().sum()).backward()
            with torch.no_grad():
                norm.x -= 0.05 * norm.x.grad
            norm.x.grad = None
            duals.step()
        return duals.record()["norm"]["dual"]

    norm = Norm()
    pair = (norm, PrimalDual(norm, lr=0.1, slack_weight=1.0, slack_optimizer="adam", schedule=0.9))
    steps(*pair)
    twin = twin_of(pair)
    assert torch.equal(steps(*pair), steps(*twin))
    assert torch.equal(pair[0].x, twin[0].x)


def test_record_is_a_copy():
    run = Run(lr=0.1).steps(0, 8)
    run.duals.record()["sum"]["dual"].fill_(99.0)
    assert run.duals.record()["sum"]["dual"].item() != 99.0


def test_moves_with_its_values():
    # The meta device stands in for another one: shapes and devices without numbers.
    run = Run(lr=0.1).steps(0, 8)
    assert run.duals.to("meta") is run.duals
    for entry in run.duals.record().values():
        assert all(tensor.device.type == "meta" for tensor in entry.values())


def test_a_level_that_was_measured_is_not_measured_again():
    def make(batches):
        return PrimalDual(Constraint(lambda x: x.mean(0), Fraction(0.5, batches), name="x"), lr=1.0)

    first, more, less = make(2), make(10), make(1)
    x = torch.ones(3, 1, requires_grad=True)
    states = []
    for factor in (1.0, 1.0, 2.0):
        first.lagrangian(x.sum() * 0, factor * x).backward()
        first.step()
        states.append(first.state_dict())
    more.load_state_dict(states[2])
    assert more.record()["x"]["bound"].tolist() == [0.5]
    assert more.record()["x"]["dual"].tolist() == [1.5]
    more.load_state_dict(states[1])  # just measured
    assert more.record()["x"]["bound"].tolist() == [0.5]
    less.load_state_dict(states[0])
    assert less.record()["x"]["bound"].tolist() == [0.5]
    # Written before states said of how many batches.
    more.load_state_dict({key: value for key, value in states[2].items() if key != "x.level.of"})
    assert more.record()["x"]["bound"].tolist() == [0.5]


def test_a_level_that_is_being_measured_goes_on_being_measured():
    x = torch.ones(3, 1, requires_grad=True)

    def make(*more):
        return PrimalDual([Constraint(lambda x: x.mean(0), 1.0, name="a"), *more], lr=1.0)

    first = make()
    for _ in range(4):
        first.lagrangian(x.sum() * 0, x).backward()
        first.step()
    later = [make(Constraint(lambda x: x.mean(0), Fraction(0.5, 3), name="b")) for _ in range(2)]
    later[0].load_state_dict(first.state_dict())  # its level begins at the fifth step
    for at, duals in enumerate((later[0], later[1])):
        if at:
            duals.load_state_dict(later[0].state_dict())
        duals.lagrangian(x.sum() * 0, x).backward()
        duals.step()
        assert "bound" not in duals.record()["b"]
