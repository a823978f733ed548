"""What a comparison asks of its plan, its store and its folder: what does not fit together is told."""

import json
import math
import shlex
import shutil
from dataclasses import replace

import pytest
import torch

from cswe.cli import main
from cswe.tokens import Item, Manifest, TokenStore
from cswe.training.cells import Plan, Result
from cswe.training.choices import flat_choices, parse_choices, parse_pool
from cswe.training.compare import compare, note_plan
from cswe.training.errors import UserError
from tests.training.comparing import COMMAND, PLAN, TINY, made, stamps


def test_results_of_another_store_are_refused(whole, make_store, digits, tmp_path):
    plan = Plan(("mean",), seeds=1, choices=tuple(TINY))
    stores = [make_store(tmp_path / f"{n}", [n % 3 for n in range(60)], seed=n).path for n in (0, 1)]
    assert Manifest.read(stores[0]).spec == Manifest.read(stores[1]).spec
    compare(stores[0], tmp_path / "study", plan, device="cpu")
    with pytest.raises(UserError, match=r"mean.*was computed on another store; choose another folder"):
        compare(stores[1], tmp_path / "study", plan, device="cpu")
    shutil.copytree(stores[0], tmp_path / "copy")
    before = stamps(tmp_path / "study")
    compare(tmp_path / "copy", tmp_path / "study", plan, device="cpu")
    file = next((tmp_path / "study" / "cells").glob("*.json"))
    content = json.loads(file.read_text())
    del content["store"]["content"]  # as earlier versions wrote it
    file.write_text(json.dumps(content))
    compare(stores[1], tmp_path / "study", plan, device="cpu")
    assert stamps(tmp_path / "study").keys() == before.keys()
    with pytest.raises(UserError, match="another store"):
        compare(digits, tmp_path / "study", plan, device="cpu")
    bare = TokenStore.create(tmp_path / "bare", [Item(torch.randn(3, 3), id=str(n)) for n in range(4)])
    with pytest.raises(UserError, match="expected labels to learn from"):
        compare(bare.path, tmp_path / "study", plan, device="cpu")


def test_scores_are_checked_before_anything_is_trained(digits, make_store, tmp_path, capsys):
    real = make_store(tmp_path / "real", [[float(n)] for n in range(12)], kind="real")
    for store, words, said in (
        (digits, ["--metric", "loss"], "expected one of top1, top5, macro_f1, balanced but got 'loss'"),
        (digits, ["--metric", "nearest"], "nearest is computed with --neighbors only"),
        (real.path, ["--neighbors"], "neighbors: expected one class a set"),
        (digits, ["--pools", "mean", "moments:readout=moments:x"], "moments:x"),
    ):
        assert main(["compare", str(store), "--out", str(tmp_path / "study"), *words]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_another_recipe_in_the_same_folder_is_refused(whole, digits, capsys):
    folder, _, _ = whole
    assert main(["compare", str(digits), "--out", str(folder), *COMMAND, "--set", "epochs=3"]) == 2
    error = capsys.readouterr().err
    assert "epochs: 2 there, 3 now" in error
    assert "Traceback" not in error


def test_a_choice_that_a_pool_does_not_look_at_is_no_reason_to_train_it_again(whole, digits):
    folder, _, _ = whole
    before = stamps(folder)
    plan = replace(PLAN, pools=("mean", "swe"), choices=(*TINY, "bound=0.5"))
    compare(digits, folder, plan, device="cpu")
    assert stamps(folder) == before
    with pytest.raises(UserError, match=r"cswe.*another recipe \(bound: 0.95 there, 0.5 now\)"):
        compare(digits, folder, replace(plan, pools=("cswe",)), device="cpu")


def test_pools_that_differ_in_what_no_file_name_can_hold_are_refused(digits, tmp_path, capsys):
    words = ["compare", str(digits), "--out", str(tmp_path / "study"), "--set", *TINY, "--device", "cpu"]
    assert main([*words, "--pools", "mean:lr=1e-3", "mean:lr=1e+3"]) == 2
    said = capsys.readouterr().err
    assert "pools: 'mean:lr=1e-3' and 'mean:lr=1e+3' would both be kept as mean-lr-1e-3.layer-0.seed-0" in said
    assert not (tmp_path / "study").exists()
    assert len(Plan(("mean:lr=1e-3", "mean:lr=1e-3", "mean:lr=1000"), seeds=1).cells([0])) == 2


@pytest.mark.parametrize("choice", ["pool=mean", "slices=4"])
def test_what_names_a_row_is_not_chosen_beside_it(digits, tmp_path, capsys, choice):
    words = ["compare", str(digits), "--out", str(tmp_path / "study"), "--pools", "swe", "--set", *TINY, choice]
    assert main([*words, "--device", "cpu"]) == 2
    name = choice.partition("=")[0]
    assert f"set: expected choices for all pools but got {name}, which is asked for by --" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_seeds_of_a_row_that_were_trained_otherwise_are_told(digits, tmp_path, capsys):
    words = ["compare", str(digits), "--out", str(tmp_path), "--pools", "mean", "--seeds", "1", "--device", "cpu"]
    for seed, epochs, told in (("0", "1", False), ("1", "1", False), ("2", "2", True), ("2", "2", True)):
        assert main([*words, "--set", *TINY, f"epochs={epochs}", "--first-seed", seed, "--quiet"]) == 0
        said = capsys.readouterr().err
        assert ("GAP, layer 0: other seeds were trained with another recipe (epochs: 1 there, 2 now)" in said) is told


def test_pools_are_compared_on_the_same_store(make_store, tmp_path):
    stores = [make_store(tmp_path / f"{n}", [n % 3 for n in range(60)], seed=n).path for n in (0, 1)]
    plan = Plan(("mean",), seeds=1, choices=tuple(TINY))
    compare(stores[0], tmp_path / "study", plan, device="cpu")
    with pytest.raises(UserError, match=r"mean.*was computed on another store; choose another folder"):
        compare(stores[1], tmp_path / "study", replace(plan, pools=("max",)), device="cpu")
    compare(stores[1], tmp_path / "study", replace(plan, pools=("mean", "max"), first_seed=1), device="cpu")  # a split


@pytest.mark.parametrize("change", [{"version": 2}, {"recipe": {"flavour": 1}}])
def test_a_cell_of_another_version_is_refused_and_kept(whole, digits, tmp_path, change):
    folder, results, _ = whole
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    file = copy / "cells" / f"{results[0].cell.name}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    before = stamps(copy)
    with pytest.raises(UserError, match=r"expected a cell of this version of cswe but got another .*update cswe"):
        compare(digits, copy, PLAN, device="cpu")
    assert stamps(copy) == before


def test_layers_and_pools_of_the_store_are_checked_before_anything_is_trained(digits, tmp_path, make_store):
    with pytest.raises(UserError, match="CLS vectors"):
        compare(digits, tmp_path / "a", Plan(("mean", "cls")), device="cpu")
    with pytest.raises(UserError, match="layers: expected some of"):
        compare(digits, tmp_path / "b", Plan(("mean",), layers=(12,)), device="cpu")
    with pytest.raises(UserError, match="baseline"):
        compare(digits, tmp_path / "c", Plan(("mean",)), device="cpu", baseline="swe")
    assert not list(tmp_path.glob("*/cells/*"))
    store = make_store(tmp_path / "store", [n % 3 for n in range(60)], cls=True)
    results = compare(store.path, tmp_path / "d", Plan(("cls", "max"), seeds=1, choices=tuple(TINY)), device="cpu")
    assert [result.size for result in results] == [3, 3]


def test_a_folder_that_grows_keeps_all_commands(tmp_path):
    def note(*pools, baseline=None):
        note_plan(tmp_path, tmp_path / "store", Plan(pools), baseline)
        return json.loads((tmp_path / "compare.json").read_text())

    first = note("mean", "swe")
    assert first["commands"] == [first["command"]]
    assert note("mean", "swe") == first
    # As earlier versions wrote it.
    (tmp_path / "compare.json").write_text(json.dumps({k: v for k, v in first.items() if k != "commands"}))
    second = note("max")
    assert second["baseline"] == "mean"
    assert second["commands"] == [first["command"], second["command"]]
    assert "--baseline" not in second["command"]  # in a new folder it would be refused: mean is not among its pools
    third = note("max", "mean")
    assert shlex.split(third["command"])[-2:] == ["--baseline", "mean"]  # which it would not take by itself
    again = note("mean", "swe")
    assert again["command"] == first["command"]
    assert again["commands"] == third["commands"] == [*second["commands"], third["command"]]
    fourth = note("max", "swe", baseline="swe")
    assert fourth["baseline"] == "swe"
    assert shlex.split(fourth["command"])[-2:] == ["--baseline", "swe"]


def test_nan_travels_through_a_file(tmp_path):
    result = made({("swe", 4): [math.nan]})[0]
    result.write(tmp_path / "cell.json")
    assert "NaN" not in (tmp_path / "cell.json").read_text()
    assert math.isnan(Result.read(tmp_path / "cell.json").scores["test"]["top1"])


def test_choices_have_the_recipe_s_types():
    assert parse_choices(["bound=5", "slack-weight=none", "train_slices=no"]) == {
        "bound": 5.0,
        "slack_weight": None,
        "train_slices": False,
    }
    for wrong in ("lr", "speed=3", "epochs=many", "train_slices=perhaps"):
        with pytest.raises(UserError):
            parse_choices([wrong])
    for wrong in ("swee", "swe:slices=3", "swe:speed=3"):
        with pytest.raises(UserError):
            parse_pool(wrong)
    with pytest.raises(UserError, match="order"):
        Plan(("swe:order=up",)).cells([0])
    choices = flat_choices(Plan(("cswe:bound=3",), (64,), recipe="points").cells([0])[0].recipe)
    assert (choices["batch_size"], choices["bound"]) == (64, 3.0)
