"""Recipes say what the paper says, and survive a file."""

import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from cswe.training import SPACES, Recipe, UserError, recipe
from cswe.training.optim import make_duals, rate_factor
from cswe.training.recipe import Optimization
from cswe.training.recipes import PROTEIN_TABLE


@pytest.mark.parametrize("name", ["images", "points", "proteins"])
def test_the_papers_recipes_are_in_the_papers_form(name):
    chosen = recipe(name)
    pooling, bounding = chosen.pooling, chosen.bounding
    assert (pooling.pool, pooling.readout, pooling.order) == ("cswe", "flatten", "reference")
    assert (bounding.wrt, bounding.bound_scale, bounding.temperature_scale) == ("both", "absolute", "absolute")
    assert bounding.relaxation == "softsort"
    assert chosen.regularization.keep_tokens == 1
    assert chosen.regularization.normalization == "none"
    assert chosen.head.head == "linear"


def test_images():
    chosen = recipe("images")
    o, b = chosen.optimization, chosen.bounding
    assert (o.batch_size, o.epochs, o.optimizer, o.lr, o.validation_share) == (1024, 80, "adam", 1e-3, 0.1)
    assert (b.slack_lr, b.dual_lr, b.slack_weight, b.bound, b.temperature) == (1e-3, 1e-3, 0.1, 21, 0.01)
    assert chosen.pooling.points == 196
    assert [rate_factor(o, epoch) for epoch in (0, 59, 60, 79)] == pytest.approx([1, 1, 0.1, 0.1])
    assert rates(chosen, 59) == pytest.approx((1e-3, 1e-3))
    assert rates(chosen, 60) == pytest.approx((1e-3, 1e-4))  # not on the dual


@pytest.mark.parametrize(("slices", "batch"), [(4, 128), (8, 128), (16, 128), (32, 128), (64, 64)])
def test_points(slices, batch):
    chosen = recipe("points", slices)
    o, b = chosen.optimization, chosen.bounding
    assert (chosen.pooling.slices, o.batch_size) == (slices, batch)
    assert (o.epochs, o.optimizer, o.lr, o.validation_share) == (200, "adam", 1e-3, 0.2)
    assert (b.slack_lr, b.dual_lr, b.slack_weight, b.bound, b.temperature) == (1e-3, 1e-3, 1, 7, 0.001)
    assert chosen.pooling.points == 512
    assert [rate_factor(o, epoch) for epoch in (49, 50, 100, 150)] == [1, 0.5, 0.25, 0.125]
    assert rates(chosen, 150) == pytest.approx((1e-3, 1.25e-4))


@pytest.mark.parametrize(
    ("choice", "value", "said"),
    [
        ("lr", "0.1", "lr: expected float but got '0.1'"),
        ("lr", None, "lr: expected float but got None"),
        ("epochs", 2.5, "epochs: expected int but got 2.5"),
        ("slices", True, "slices: expected int but got True"),
        ("standardize", "no", "standardize: expected bool but got 'no'"),
        ("pool", ["mean"], "pool: expected one of mean, sum"),
    ],
)
def test_choices_of_other_types_are_told(choice, value, said):
    with pytest.raises(UserError, match=said):
        Recipe().with_(**{choice: value}).check()
    Recipe().with_(lr=np.float64(0.1), bound=1, clip=None).check()  # what counts as a number is one


def test_tuned_is_regularised_and_small_enough_to_search_with():
    chosen = recipe("tuned")
    p, o, r = chosen.pooling, chosen.optimization, chosen.regularization
    assert (p.pool, p.readout, p.weightings, p.slices, p.standardize) == ("moments", "moments:2", 1, 512, True)
    assert p.weightings * p.slices * 2 == 1024
    assert (o.optimizer, o.weight_decay, o.decay, o.schedule) == ("adamw", 0.2, "head", "cosine")
    assert (r.keep_tokens, r.dropout, r.label_smoothing, r.normalization) == (0.5, 0.5, 0.1, "batch")
    assert recipe("tuned", 64).pooling.slices == 64


# The paper's table, row by row: L, and (ε, η_λ, α, τ) for ESM-2 8M, 35M, 150M, 650M.
TABLE = """
1    5 0.001 1 0.01     10 0.001 1 0.01    10 0.001 1 0.01    5 0.001 0.1 0.01
4    5 0.001 1 0.001    5 0.001 0.1 0.001  10 0.001 1 0.001   10 0.001 0.1 0.001
16   5 0.001 0.1 0.001  10 0.001 1 0.001   10 0.001 1 0.001   10 0.001 0.1 0.001
64   10 0.001 0.1 0.01  10 0.001 0.1 0.01  10 0.001 0.1 0.01  10 0.001 0.1 0.01
"""


def test_proteins():
    rows = [[float(word) for word in line.split()] for line in TABLE.strip().splitlines()]
    for slices, *numbers in rows:
        for place, size in enumerate(("8M", "35M", "150M", "650M")):
            chosen = recipe("proteins", int(slices), size)
            b = chosen.bounding
            assert [b.bound, b.dual_lr, b.slack_weight, b.temperature] == numbers[4 * place : 4 * place + 4]
            assert chosen.pooling.slices == slices
    o = chosen.optimization
    assert (o.optimizer, o.lr, o.schedule, o.schedule_every, o.batch_size, o.epochs) == (
        "adamw",
        1e-4,
        "restarts",
        10,
        32,
        50,
    )
    assert (chosen.pooling.points, b.slack_lr) == (100, 0.01)
    assert rates(chosen, 3) == pytest.approx((1e-3 * 0.95**3, 1e-2 * 0.95**3))
    assert recipe("proteins", 10).bounding == recipe("proteins", 16).bounding  # the nearest row
    assert set(PROTEIN_TABLE) == {1, 4, 16, 64}


def rates(chosen, epoch):
    duals = make_duals(swe_pool(), chosen.bounding)
    for _ in range(epoch):
        duals.next_epoch()
    return duals.rates


def swe_pool():
    from cswe import SWEPool

    return SWEPool(2, 2, 2)


def test_grids():
    assert SPACES["images"]["bound"] == (11, 15, 17, 18, 19, 20, 21, 22, 24)
    assert SPACES["images"]["slack_weight"] == (0.1, 0.5, 1)
    assert SPACES["points"]["bound"] == (1, 3.5, 5, 7)
    assert SPACES["proteins"]["bound"] == (5, 10)
    assert {name: space["slack_lr"] for name, space in SPACES.items()} == {
        "images": (0.001, 0.01),
        "points": (0.001,),
        "proteins": (0.01,),
    }
    for name, space in SPACES.items():
        for choice, values in space.items():
            recipe(name).with_(**{choice: values[0]}).check()
        if name != "proteins":
            chosen = recipe(name).bounding
            assert all(getattr(chosen, choice) in values for choice, values in space.items())


SCHEDULES = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 4, 0.3),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_torch(name):
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = SCHEDULES[name](optimizer)
    choice = Optimization(epochs=12, schedule=name, schedule_every=4, schedule_factor=0.3)
    for epoch in range(12):
        assert rate_factor(choice, epoch) == pytest.approx(schedule.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        schedule.step()


def test_a_recipe_is_frozen_and_survives_a_file():
    for chosen in (Recipe(), recipe("points", 64), recipe("proteins", 1, "650M").with_(slack_weight=None)):
        assert Recipe.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen
    with pytest.raises(FrozenInstanceError):
        Recipe().name = "other"
    with pytest.raises(UserError, match="colour"):
        Recipe().with_(colour="red")
    with pytest.raises(UserError, match="flavour"):
        Recipe.from_json({"pooling": {"flavour": 1}})


@pytest.mark.parametrize(
    ("choice", "value", "words"),
    [
        ("lr", -1.0, "lr: expected more than 0 but got -1"),
        ("bound", 0.0, "bound: expected more than 0 but got 0"),
        ("keep_tokens", 1.5, "keep_tokens: expected more than 0 and at most 1 but got 1.5"),
        ("pool", "median", "pool: expected one of mean, .* but got 'median'"),
        ("epochs", 0, "epochs: expected at least 1 but got 0"),
        ("schedule_factor", -1.0, "schedule_factor: expected at least 0 but got -1"),
    ],
)
def test_choices_that_make_no_sense_are_named(choice, value, words):
    with pytest.raises(UserError, match=words):
        Recipe().with_(**{choice: value}).check()


def test_unknown_names():
    with pytest.raises(UserError, match="recipe: expected one of digits"):
        recipe("imges")
    with pytest.raises(UserError, match="esm: expected one of 8M"):
        recipe("proteins", esm="3B")
