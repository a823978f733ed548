"""What a run learns, and with what."""

import importlib
import json
import math
from typing import get_args

import pytest
import torch

import cswe
from cswe.cli import main
from cswe.tokens import Batch, Item, TokenStore
from cswe.training import TrainingData, evaluate, fit, recipe
from cswe.training.checkpoint import BEST, LAST
from cswe.training.errors import UserError
from cswe.training.fit import _move_duals, _step
from cswe.training.optim import make_optimizer
from cswe.training.parallel import Ranks
from cswe.training.recipe import PoolName
from cswe.training.regularize import drop, keep_tokens
from cswe.training.state import State

CPU = torch.device("cpu")


def quick(**choices):
    base = {"slices": 4, "points": 6, "batch_size": 16, "epochs": 2, "bound_batches": 2, "lr": 0.05}
    return recipe("digits").with_(**(base | choices))


def run(store, folder, **choices):
    return list(fit(TrainingData.open(store, quick(**choices), CPU), folder))


@pytest.fixture(scope="module")
def classes(make_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes") / "store"
    return make_store(folder, [n % 3 for n in range(60)], classes=["a", "b", "c"], cls=True)


@pytest.mark.parametrize("pool", get_args(PoolName))
def test_every_pool_learns(classes, tmp_path, pool):
    records = run(classes, tmp_path / "run", pool=pool, epochs=20, normalization="none")
    assert records[-1]["validation"]["top1"] > 0.6
    model = cswe.load(tmp_path / "run")
    assert model.facts.labels.names == ("a", "b", "c")
    scores = evaluate(model, classes, "validation")
    best = max(record["validation"]["top1"] for record in records)
    assert scores["top1"] == best
    assert ("swgg" in records[0]) == (pool == "cswe")
    assert ("swgg_exact" in records[0]) == (pool in ("swe", "cswe"))


@pytest.mark.parametrize(
    "choices",
    [
        {"readout": "flatten", "order": "reference", "wrt": "both", "normalization": "none"},
        {"head": "mlp", "hidden": 8, "normalization": "layer"},
        {"standardize": True},
        {"start": "data", "standardize": True, "weightings": 2},
        {"pool": "attention", "standardize": True, "queries": 2},
        {"precision": "bfloat16"},
        {"optimizer": "adamw", "weight_decay": 0.1, "label_smoothing": 0.1, "dropout": 0.3, "keep_tokens": 0.5},
        {"relaxation": "lapsum", "slack_weight": None},
        {"max_tokens": 40, "early_stop": 1},
        {"dual_on": "hard", "batch_size": 31},  # the last batch has one set
    ],
    ids=lambda choices: "-".join(choices),
)
def test_choices_run_and_load(classes, tmp_path, choices):
    records = run(classes, tmp_path / "run", **choices)
    assert all(math.isfinite(record["loss"]) for record in records)
    again = cswe.load(tmp_path / "run" / LAST)
    assert evaluate(again, classes, "validation")["top1"] == records[-1]["validation"]["top1"]


def test_multi_label(make_store, tmp_path):
    labels = [[n % 2, (n // 2) % 2] for n in range(80)]
    store = make_store(tmp_path / "store", labels, kind="multilabel", classes=["x", "y"])
    records = run(store, tmp_path / "run", epochs=5, label_smoothing=0.05)
    assert records[-1]["validation"]["f_max"] > 0.9
    assert cswe.load(tmp_path / "run").facts.task == "multi-label"


def test_where_no_score_says_which_epoch_is_best_it_is_the_last(make_store, tmp_path):
    labels = [[n % 2, 1] if n % 4 < 2 else [0, 0] for n in range(40)]  # none in validation
    run(make_store(tmp_path / "store", labels, kind="multilabel"), tmp_path / "run", pool="mean", epochs=3)
    notes = json.loads((tmp_path / "run" / BEST / "model.json").read_text())
    assert math.isnan(notes["validation"]["f_max"])
    assert notes["epoch"] == 3


def test_regression_in_any_unit(make_store, tmp_path):
    labels = [[float(n % 5)] for n in range(80)]
    store = make_store(tmp_path / "store", [[1e4 + 1e3 * label[0] * 1] for label in labels], kind="real", dim=3)
    # The tokens lie where the label says: far out, so they are standardised.
    records = run(store, tmp_path / "run", epochs=8, standardize=True)
    assert records[-1]["validation"]["r2"] > 0.8
    model = cswe.load(tmp_path / "run")
    batch = next(iter(store.batches(4)))
    assert float(model(batch.tokens, batch.mask).detach().mean()) > 5e3


def test_a_validation_set_is_held_out_where_there_is_none(make_store, tmp_path):
    store = make_store(tmp_path / "store", [n % 2 for n in range(40)], classes=["a", "b"], splits=("train",))
    data = TrainingData.open(store, quick(validation_share=0.2), CPU)
    assert len(data.validation.items) == 8
    assert not set(data.validation.items) & set(data.train.items)
    assert sorted(store.labels[data.validation.items].tolist()) == [0] * 4 + [1] * 4


def test_the_record_of_an_epoch(trained):
    lines = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    last = lines[-1]
    assert {len(last["swgg"][name]) for name in ("values", "bound", "slack", "dual")} == {4}
    assert len(last["swgg_exact"]) == 4
    assert {"loss", "rate", "seed", "seconds"} <= set(last)
    assert {"loss", "top1", "top5", "macro_f1", "balanced"} == set(last["validation"])
    assert sorted(path.name for path in (trained / LAST).iterdir()) == [
        "model.json",
        "model.safetensors",
        "training.json",
        "training.safetensors",
    ]
    notes = json.loads((trained / BEST / "model.json").read_text())
    assert notes["tokens"]["backbone"] == {"name": "identity"}
    assert notes["tokens"]["labels"]["names"] == [str(n) for n in range(10)]
    assert "recipe" in json.loads((trained / "recipe.json").read_text())


def test_early_stopping(classes, tmp_path):
    records = run(classes, tmp_path / "run", epochs=50, lr=1e-9, early_stop=3, pool="mean")
    scores = [record["validation"]["top1"] for record in records]
    assert len(records) == scores.index(max(scores)) + 1 + 3 < 50


def test_other_loggers_get_every_record(classes, tmp_path):
    class Kept(list):
        write = list.append

    kept = Kept()
    data = TrainingData.open(classes, quick(pool="mean"), CPU)
    assert list(fit(data, tmp_path / "run", loggers=[kept])) == kept


def test_tensorboard(digits, tiny, tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra 'train'")
    assert main(["train", str(digits), "--out", str(tmp_path / "run"), *tiny, "--epochs", "1", "--tensorboard"]) == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_profile_splits_an_epoch(digits, tiny, tmp_path, capsys):
    assert main(["train", str(digits), "--out", str(tmp_path / "run"), *tiny, "--epochs", "1", "--profile"]) == 0
    told = capsys.readouterr().out
    seconds = json.loads((tmp_path / "run" / "log.jsonl").read_text())["seconds"]
    for phase in ("loading", "pool", "constraint", "head", "optimizer"):
        assert phase in told
        assert seconds[phase] > 0
    assert sum(value for name, value in seconds.items() if name != "all") == pytest.approx(seconds["all"], rel=0.2)


def test_only_the_head_decays_unless_asked(classes, tmp_path):
    data = TrainingData.open(classes, quick(weight_decay=0.1), CPU)
    model = State.start(data, data.facts, CPU).model
    for decay, expected in (("head", [0.1, 0.0]), ("all", [0.1, 0.1])):
        optimizer = make_optimizer(model, quick(weight_decay=0.1, decay=decay).optimization)
        assert [group["weight_decay"] for group in optimizer.param_groups] == expected


def test_a_skipped_step_leaves_weights_and_multipliers_alone(classes, tmp_path):
    data = TrainingData.open(classes, quick(precision="float16", bound=0.1, bound_scale="absolute"), CPU)
    state = State.start(data, data.facts, CPU)
    batch = next(iter(data.train))
    for overflow in (False, True):
        before = {name: value.clone() for name, value in state.model.state_dict().items()}
        steps, scale = state.duals.steps, state.scaler.get_scale()
        loss = state.duals.lagrangian(state.model.embed_batch(batch).square().mean(), batch.tokens, batch.mask)
        state.scaler.scale(loss * 1e-3).backward()
        if overflow:
            state.model.pool.slicer.weight.grad.fill_(float("inf"))
        skipped = _step(state, None, tmp_path)
        _move_duals(state, tmp_path, skipped=skipped, look=True)
        assert skipped == overflow
        assert state.duals.steps == steps + (not overflow)
        assert (state.scaler.get_scale() < scale) == overflow
        same = all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
        assert same == overflow


def batch_of(lengths, dim=2, weights=False):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    tokens = torch.where(mask.unsqueeze(-1), torch.randn(len(lengths), max(lengths), dim), 0.0)
    masses = torch.where(mask, torch.rand(mask.shape) + 0.1, 0.0) if weights else None
    return Batch(tokens, mask, None, None, masses, None, torch.arange(len(lengths)))


def test_kept_tokens_are_a_random_part_of_each_set():
    batch = batch_of([10, 4, 1], weights=True)
    kept = keep_tokens(batch, 0.5, torch.Generator().manual_seed(0))
    assert kept.mask.sum(1).tolist() == [5, 2, 1]
    for row in range(3):
        own = [tuple(token) for token in batch.tokens[row][batch.mask[row]].tolist()]
        chosen = [tuple(token) for token in kept.tokens[row][kept.mask[row]].tolist()]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(own)
        places = [own.index(token) for token in chosen]
        assert kept.weights[row][kept.mask[row]].tolist() == batch.weights[row][places].tolist()
    assert (kept.weights[~kept.mask] == 0).all()
    other = keep_tokens(batch, 0.5, torch.Generator().manual_seed(1))
    assert not torch.equal(other.tokens, kept.tokens)
    assert keep_tokens(batch, 1.0, torch.Generator()) is batch


def test_dropout_keeps_the_mean():
    dropped = drop(torch.ones(10_000), 0.3, torch.Generator().manual_seed(0))
    assert float((dropped == 0).float().mean()) == pytest.approx(0.3, abs=0.02)
    assert float(dropped.mean()) == pytest.approx(1, abs=0.03)


def test_what_is_dropped_is_no_spread_of_the_vectors(tmp_path):
    """Numbers far from zero, as spreads are: dropped before the normalisation, they would be noise and nothing else."""
    items = [
        Item(100 + 0.1 * torch.randn(4, 3) + n % 2, label=n % 2, id=str(n), split=split)
        for split in ("train", "validation")
        for n in range(200)
    ]
    store = TokenStore.create(tmp_path / "store", items, classes=["a", "b"])
    records = run(store, tmp_path / "run", pool="mean", dropout=0.5, epochs=15, batch_size=20)
    variance = cswe.load(tmp_path / "run").normalization.running_var
    assert float(variance.max()) < 1.0
    assert records[-1]["validation"]["top1"] == 1.0


def test_training_leaves_the_global_generator_alone(classes, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(classes, tmp_path / "run", dropout=0.2, keep_tokens=0.5, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_is_chosen(tmp_path, capsys):
    items = [
        Item(
            {6: torch.randn(4, 3), 12: torch.randn(4, 5)},
            label=n % 2,
            id=str(n),
            split=("train", "validation", "test")[n % 3],
        )
        for n in range(24)
    ]
    store = TokenStore.create(tmp_path / "store", items, classes=["a", "b"])
    arguments = ["train", str(store.path), "--out", str(tmp_path / "run"), "--pool", "mean", "--epochs", "1"]
    assert main([*arguments]) == 2
    assert main([*arguments, "--layer", "6", "--quiet"]) == 0
    assert cswe.load(tmp_path / "run").facts.layer == 6
    assert main([*arguments, "--layer", "12", "--quiet", "--resume"]) == 2
    assert "was begun on layer 6 but got 12" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), str(store.path)]) == 0


def test_a_recipe_from_a_file_and_options_that_change_it(trained, digits, tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["--recipe", str(trained / "recipe.json"), "--epochs", "1", "--device", "cpu", "--quiet"]
    assert main(["train", str(digits), "--out", str(run), *arguments]) == 0
    mine, theirs = cswe.load(run).facts.recipe, cswe.load(trained).facts.recipe
    assert mine == theirs.with_(epochs=1)
    result = json.loads((run / "result.json").read_text())
    assert result["epoch"] == 1
    capsys.readouterr()
    assert main(["evaluate", str(run), str(digits), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result["test"]


def test_the_papers_settings_follow_the_number_of_slices(make_store, tmp_path):
    store = make_store(tmp_path / "store", [n % 3 for n in range(24)], classes=["a", "b", "c"])
    arguments = ["--slices", "64", "--points", "4", "--epochs", "1", "--device", "cpu", "--quiet"]
    for name, choice, value in (("points", "batch_size", 64), ("proteins", "bound", 10.0)):
        assert main(["train", str(store.path), "--out", str(tmp_path / name), "--recipe", name, *arguments]) == 0
        saved = json.loads((tmp_path / name / "recipe.json").read_text())["recipe"]
        assert saved["name"] == name
        assert {**saved["optimization"], **saved["bounding"]}[choice] == value


def test_no_run_is_trained_alone_among_others(digits, tmp_path, monkeypatch):
    """Its multipliers would be averaged with theirs."""
    data = TrainingData.open(TokenStore(digits), quick(), CPU)
    monkeypatch.setattr(importlib.import_module("cswe.training.fit"), "is_parallel", lambda: True)
    with pytest.raises(UserError, match=r"destroy_process_group"):
        next(fit(data, tmp_path / "run", ranks=Ranks()))
    assert not (tmp_path / "run").exists()
