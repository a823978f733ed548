"""What a pool is said not to look at is changed, all of it, and training must not notice."""

from dataclasses import fields
from typing import get_args

import pytest
import torch

from cswe.tokens import TokenStore
from cswe.training.checkpoint import BEST
from cswe.training.choices import flat_choices
from cswe.training.data import TrainingData
from cswe.training.decisive import decisive, difference, ignored
from cswe.training.fit import fit
from cswe.training.recipe import Bounding, PoolName, Recipe

START = {
    "slices": 4, "points": 6, "epochs": 1, "batch_size": 16, "bound_batches": 1, "keep_tokens": 0.7, "dropout": 0.1,
    "standardize": True, "readout": "moments:2",
}  # fmt: skip
OTHER = {
    "slices": 3, "points": 5, "readout": "moments:3", "weightings": 1, "normalize_keys": True, "order": "reference",
    "interpolation": "linear", "initial": "normal", "start": "data", "queries": 2, "heads": 3, "train_slices": False,
    "train_reference": False, "bound": 0.5, "bound_scale": "absolute", "bound_batches": 2, "slack_weight": None,
    "dual_lr": 0.5, "slack_lr": 0.5, "slack_optimizer": "projected", "dual_factor": 0.5, "dual_every": 2,
    "slack_factor": 0.5, "slack_every": 2, "relaxation": "lapsum", "temperature": 0.3,
    "temperature_scale": "absolute", "wrt": "both", "dual_on": "hard", "weighted_bound": True, "dual_limit": 1e-9,
    "patience": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def store(make_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets") / "store"
    make_store(folder, [number % 3 for number in range(80)], classes=["a", "b", "c"], cls=True)
    return folder


def trained(store, recipe, run):
    """Return what a run wrote down, without its times, and what it learned."""
    data = TrainingData.open(TokenStore(store, 0), recipe.check(), torch.device("cpu"))
    records = [{name: value for name, value in record.items() if name != "seconds"} for record in fit(data, run)]
    return records, (run / BEST / "model.safetensors").read_bytes()


@pytest.mark.parametrize("pool", get_args(PoolName))
def test_what_a_pool_does_not_look_at_changes_nothing(pool, store, tmp_path):
    recipe = Recipe().with_(pool=pool, **START)
    changed = recipe.with_(name="other", **{name: OTHER[name] for name in ignored(pool)})
    before, after = flat_choices(recipe), flat_choices(changed)
    assert all(before[name] != after[name] for name in ignored(pool))
    assert difference(recipe, changed) == ""
    assert trained(store, recipe, tmp_path / "one") == trained(store, changed, tmp_path / "two")


@pytest.mark.parametrize("pool", get_args(PoolName))
def test_everything_else_counts(pool):
    recipe = Recipe().with_(pool=pool)
    for part in (recipe.head, recipe.optimization, recipe.regularization):
        for name in (entry.name for entry in fields(part)):
            assert name not in ignored(pool)
    assert difference(recipe, recipe.with_(lr=0.5, dropout=0.5)) != ""
    assert difference(recipe, recipe.with_(pool="sum" if pool != "sum" else "max")) != ""


def test_a_bound_counts_where_there_is_one():
    recipe = Recipe().with_(pool="cswe")
    for name in (entry.name for entry in fields(Bounding)):
        other = recipe.with_(**{name: OTHER[name]})
        assert f"{name}:" in difference(recipe, other)
    assert decisive(recipe.with_(bound=0.3)).bounding.bound == 0.3
