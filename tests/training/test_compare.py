"""A comparison: every cell once, whatever happens on the way; and tables that say what the cells say."""

import csv
import json
import math
import os
import random
import shlex
import shutil
from dataclasses import replace

import pytest
import torch

from cswe.cli import main
from cswe.tokens import Item, Manifest, TokenStore
from cswe.training.cells import Cell, Plan, Result, read_results
from cswe.training.choices import flat_choices, parse_choices, parse_pool
from cswe.training.compare import compare, note_plan
from cswe.training.errors import UserError
from cswe.training.locking import Lock
from cswe.training.recipe import Recipe
from cswe.training.table import Mean, Table

TINY = ["epochs=2", "batch_size=64", "points=8", "bound_batches=2"]
PLAN = Plan(("mean", "swe", "cswe"), (2, 4), seeds=2, choices=tuple(TINY))
COMMAND = ["--pools", *PLAN.pools, "--slices", "2", "4", "--seeds", "2", "--set", *TINY, "--device", "cpu"]


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "whole"
    told = []
    results = compare(digits, folder, PLAN, device="cpu", tell=told.append)
    return folder, results, told


def made(accuracies, *, layer=0, error=None):
    """Results with these accuracies: {(pool, slices): [one a seed]}."""
    results = []
    for (pool, slices), values in accuracies.items():
        for seed, value in enumerate(values):
            scores = {split: {"top1": value, "top5": 1.0} for split in ("train", "validation", "test")}
            cell = Cell(pool, layer, slices, seed, Recipe())
            results.append(Result(cell, 8, {} if error else scores, {"task": "classification"}, error))
    return results


def stamps(folder):
    """What changes when a cell is trained or written again."""
    return {
        file: (file.stat().st_mtime_ns, file.stat().st_ino)
        for name in (path.stem for path in (folder / "cells").glob("*.json"))
        for file in (folder / "cells" / f"{name}.json", folder / "runs" / name / "log.jsonl")
    }


def numbers(results):
    return {result.cell.name: (result.scores, result.size) for result in results}


def test_every_cell_is_there_and_says_what_it_was_made_with(whole):
    folder, results, told = whole
    assert len(results) == 2 + 4 + 4
    assert len(told) == 10
    assert {result.cell.slices for result in results if result.cell.pool == "mean"} == {None}
    for result in results:
        assert set(result.scores) == {"train", "validation", "test"}
        content = json.loads((folder / "cells" / f"{result.cell.name}.json").read_text())
        assert content["versions"]["torch"]
        assert content["memory"]["bytes"] > 0
        assert content["seconds"] > 0
        assert Recipe.from_json(content["recipe"]).optimization.epochs == 2
    assert numbers(read_results(folder)) == numbers(results)
    assert not list(folder.glob("cells/*.lock"))
    assert not list(folder.glob("runs/*/last"))


def test_a_second_time_nothing_is_trained(whole, digits):
    folder, results, _ = whole
    before, told = stamps(folder), []
    again = compare(digits, folder, PLAN, device="cpu", tell=told.append)
    assert told == ["10 of 10 cells are there already"]
    assert stamps(folder) == before
    assert numbers(again) == numbers(results)


def test_killed_at_any_moment_nothing_is_lost_and_nothing_done_twice(server, whole, digits, tmp_path):
    _, results, _ = whole
    answer = server.run("compare", digits, "--out", tmp_path / "timed", *COMMAND)
    assert answer["codes"] == [0], answer["said"]
    chance, kills, saved = random.Random(1), 0, 0
    for number in range(12):
        folder, kept = tmp_path / f"killed {number}", []
        for _ in range(2):
            moment = chance.uniform(0.2, 0.9) * answer["seconds"]
            if server.run("compare", digits, "--out", folder, *COMMAND, after=moment)["codes"] == [-9]:
                kept.append(stamps(folder))
        done = server.run("compare", digits, "--out", folder, *COMMAND)
        assert done["codes"] == [0], done["said"]
        after = stamps(folder)
        for before in kept:
            assert {file: after[file] for file in before} == before, "a finished cell was done again"
        assert numbers(read_results(folder)) == numbers(results)
        kills, saved = kills + len(kept), saved + sum(map(len, kept))
        if kills >= 4 and saved:
            break
    assert kills >= 4
    assert saved, "some cell should have been finished before a kill"


def test_killed_while_a_finished_run_is_tidied(whole, digits, tmp_path, monkeypatch):
    _, results, _ = whole
    removed = []

    def killed(folder, **options):
        if folder.name.startswith("last") and folder.is_dir():
            next(folder.iterdir()).unlink()
            removed.append(folder)
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            compare(digits, tmp_path, replace(PLAN, pools=("mean",)), device="cpu")
    assert len(removed) == 1
    again = compare(digits, tmp_path, replace(PLAN, pools=("mean",)), device="cpu")
    assert numbers(again) == numbers(results[:2])


def test_two_processes_share_a_folder(server, whole, digits, tmp_path):
    _, results, _ = whole
    folder = tmp_path / "shared"
    answer = server.run("compare", digits, "--out", folder, *COMMAND, environments=({}, {}))
    assert answer["codes"] == [0, 0], answer["said"]
    assert numbers(read_results(folder)) == numbers(results)


def test_a_held_cell_is_waited_for_and_taken_over_when_its_holder_is_gone(whole, digits, tmp_path, monkeypatch):
    folder, results, _ = whole
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    name = results[0].cell.name
    (copy / "cells" / f"{name}.json").unlink()
    lock = Lock(copy / "cells" / f"{name}.lock")
    assert lock.take()
    told = []
    monkeypatch.setattr("cswe.training.compare.sleep", lambda seconds: lock.release())
    assert numbers(compare(digits, copy, PLAN, device="cpu", tell=told.append)) == numbers(results)
    assert any("other processes" in line for line in told)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": "cswe-cell", "version": 1}'])
def test_a_damaged_cell_is_said_and_done_again(whole, digits, tmp_path, damage):
    folder, results, _ = whole
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    file = copy / "cells" / f"{results[0].cell.name}.json"
    file.write_text(damage)
    before, told = stamps(copy), []
    assert numbers(compare(digits, copy, PLAN, device="cpu", tell=told.append)) == numbers(results)
    assert any("is damaged" in line and file.name in line for line in told)
    changed = {path for path, stamp in stamps(copy).items() if before[path] != stamp}
    assert {path.name for path in changed} == {file.name, "log.jsonl"}


def test_processes_of_a_launcher_share_the_cells(server, launched, whole, digits, tmp_path):
    _, results, _ = whole
    answer = server.run("compare", digits, "--out", tmp_path / "study", *COMMAND, environments=launched())
    assert answer["codes"] == [0, 0], answer["said"]
    assert numbers(read_results(tmp_path / "study")) == numbers(results)


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


def test_scores_that_were_not_asked_for_are_added_where_models_were_kept(digits, tmp_path, capsys):
    command = ["compare", str(digits), "--pools", "mean", "--seeds", "1", "--set", *TINY, "--device", "cpu"]
    assert main([*command, "--out", str(tmp_path / "all"), "--neighbors"]) == 0
    for name, keep, metric in (("kept", [], "nearest"), ("bare", ["--no-keep-models"], "top1")):
        assert main([*command, "--out", str(tmp_path / name), "--no-test", *keep]) == 0
        log = next((tmp_path / name).glob("runs/*/log.jsonl")).stat()
        capsys.readouterr()
        assert main([*command, "--out", str(tmp_path / name), "--neighbors", "--metric", metric, *keep]) == 0
        told = capsys.readouterr().out
        assert next((tmp_path / name).glob("runs/*/log.jsonl")).stat().st_mtime_ns == log.st_mtime_ns
        assert ("1 of 1 cells stay without scores" in told) == (name == "bare")
    assert numbers(read_results(tmp_path / "kept")) == numbers(read_results(tmp_path / "all"))
    assert main([*command, "--out", str(tmp_path / "kept"), "--metric", "nearest"]) == 0  # it is there by now
    assert set(read_results(tmp_path / "bare")[0].scores) == {"train", "validation"}
    assert json.loads((tmp_path / "bare" / "compare.json").read_text())["command"].endswith(
        "--neighbors --no-keep-models"
    )


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


def test_a_cell_that_cannot_be_trained_fails_alone(digits, tmp_path):
    """By an argument that is told only when it is used."""
    plan = Plan(("cswe:slack_factor=-1", "mean"), (2,), seeds=1, choices=tuple(TINY))
    failed, other = compare(digits, tmp_path, plan, device="cpu")
    assert "slack_schedule" in failed.error
    assert other.error is None


def test_a_failed_run_is_said_in_the_table_and_can_be_tried_again(digits, tmp_path):
    plan = Plan(("cswe",), (2,), seeds=2, choices=(*TINY, "bound=0.1", "dual_limit=1e-9"))
    results = compare(digits, tmp_path / "study", plan, device="cpu")
    assert all("ran away" in (result.error or "") for result in results)
    assert "2 of 2 runs failed" in Table.of(read_results(tmp_path / "study")).markdown()
    told = []
    compare(digits, tmp_path / "study", plan, device="cpu", tell=told.append)
    assert told == ["2 of 2 cells are there already"]
    compare(digits, tmp_path / "study", plan, device="cpu", tell=told.append, retry=True)
    assert len(told) == 3


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


def test_the_command_prints_and_writes_tables(whole, digits, tmp_path, capsys):
    folder, _, _ = whole
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert main(["compare", str(digits), "--out", str(copy), *COMMAND, "--baseline", "swe", "--quiet"]) == 0
    printed = capsys.readouterr().out
    for word in ("| GAP", "| C-SWE", "Train", "Validation", "Test", "against SWE", "table.csv"):
        assert word in printed
    assert (copy / "table.md").read_text() in printed
    lines = (copy / "table.csv").read_text().splitlines()
    assert lines[0].startswith("pool,layer,slices,size,split,metric,mean,std,seeds")
    assert len(lines) == 1 + 5 * 3 * 5
    assert len((copy / "differences.csv").read_text().splitlines()) == 1 + 3 * 2
    assert json.loads((copy / "compare.json").read_text())["command"].startswith("cswe compare ")


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


def test_more_jobs_give_the_same_table(whole, digits, tmp_path, monkeypatch):
    _, results, _ = whole
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["compare", str(digits), "--out", str(tmp_path / "two"), *COMMAND, "--jobs", "2", "--quiet"]) == 0
    assert numbers(read_results(tmp_path / "two")) == numbers(results)


def test_means_and_paired_differences_are_right():
    table = Table.of(made({("mean", None): [0.5, 0.6, 0.7], ("swe", 4): [0.6, 0.6, 0.9], ("swe", 16): [0.7, 0.8, 0.9]}))
    mean = table.rows[1].mean("test", "top1")
    assert mean.mean == pytest.approx(0.7)
    assert mean.std == pytest.approx(math.sqrt((0.01 + 0.01 + 0.04) / 2))
    assert mean.text() == "70.00 (17.32)"
    first, second = table.differences()
    assert first.mean.mean == pytest.approx(0.1)  # of 0.1, 0.0, 0.2
    assert first.mean.error == pytest.approx(0.1 / math.sqrt(3))
    assert not first.clear
    assert second.mean.mean == pytest.approx(0.2)
    assert second.clear
    against = table.differences(baseline="swe")
    assert [entry.row.pool for entry in against] == []  # mean has no slices, so no row of swe to be compared with
    assert "+20.00 (0.00)" in table.markdown()


def test_what_is_clear_is_what_student_says():
    stats = pytest.importorskip("scipy.stats")
    for count in (2, 3, 5, 31, 50):
        values = [(-1.0) ** number for number in range(count)]
        spread = Mean.of(values)
        limit = float(stats.t.ppf(0.975, min(count - 1, 30))) * spread.error
        for factor, clear in ((0.999, False), (1.001, True)):
            assert replace(spread, mean=-factor * limit).clear is clear
    assert not Mean.of([0.5]).clear


def test_what_is_missing_or_no_number_is_shown_as_such():
    results = made({("swe", 4): [math.nan, 0.5]}) + made({("mean", None): [0.5]}, error="the loss became nan")
    text = Table.of(results).markdown()
    assert "nan" in text
    assert "1 of 1 runs failed" in text
    assert Mean.of([0.25]).text() == "25.00"
    assert Mean.of([]).text() == "–"
    assert Table.of([]).markdown()
    with pytest.raises(UserError, match="metric: expected one of top1, top5"):
        Table.of(results, "top3")


def test_the_task_is_that_of_a_run_that_did_not_fail():
    failed = made({("mean", None): [0.5]}, error="no epoch was finished")
    cell = Cell("swe", 0, 4, 0, Recipe())
    whole = Result(cell, 8, {"test": {"r2": 0.25}}, {"task": "regression"})
    assert Table.of([*failed, whole]).metric == "r2"
    assert Table.of(failed).metric == "top1"


def test_sizes_of_all_layers_are_shown():
    results = []
    for layer, sizes in {6: {"mean": 2, "swe": 0, "max": 0}, 12: {"mean": 5, "swe": 8, "max": 0}}.items():
        for pool, size in sizes.items():
            made_here = made({(pool, None): [0.5]}, layer=layer, error=None if size else "the loss became nan")
            results += [replace(result, size=size) for result in made_here]
    lines = Table.of(results).markdown().splitlines()[4:7]
    assert [line.split("|")[3].strip() for line in lines] == ["2 / 5", "8", ""]


def test_a_row_of_which_all_runs_failed_has_a_line_in_the_csv():
    results = made({("mean", None): [0.5]}) + made({("swe", 4): [0.5, 0.6]}, error="the loss became nan")
    head, *lines = csv.reader(Table.of(results).csv().splitlines())
    assert len(lines) == 3 * 2 + 1
    told = dict(zip(head, lines[-1], strict=True))
    assert told == dict.fromkeys(head, "") | {
        "pool": "swe",
        "layer": "0",
        "slices": "4",
        "seeds": "0",
        "failed": "2",
    }


def test_layers_stand_side_by_side():
    results = made({("mean", None): [0.4, 0.5]}, layer=6) + made({("mean", None): [0.6, 0.7]}, layer=12)
    lines = Table.of(results).markdown().splitlines()
    assert "Layer 6: test" in lines[2]
    assert "Layer 12: test" in lines[2]
    assert lines[4].count("45.00 (7.07)") == 3
    assert lines[4].count("65.00 (7.07)") == 3


def test_rows_with_and_without_a_score_stand_together():
    with_it, without = made({("mean", None): [0.5]}), made({("swe", 4): [0.6]})
    for split in ("validation", "test"):
        with_it[0].scores[split]["nearest"] = 0.4
    table = Table.of(with_it + without, "nearest")
    assert [row.mean("test", "nearest").text() for row in table.rows] == ["40.00", "–"]
    assert table.rows[0].mean("train", "nearest").text() == "–"
    assert table.markdown()
    assert table.csv()


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


def test_a_lock_ends_with_its_process(tmp_path):
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    file = tmp_path / "lock"
    pid = os.fork()
    if pid == 0:
        Lock(file).take()
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert file.exists()
    lock = Lock(file)
    assert lock.take()
    lock.release(remove=True)
    assert not file.exists()
