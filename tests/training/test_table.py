"""Tables say what the cells say."""

import csv
import json
import math
import shutil
from dataclasses import replace

import pytest

from cswe.cli import main
from cswe.training.cells import Cell, Result
from cswe.training.errors import UserError
from cswe.training.recipe import Recipe
from cswe.training.table import Mean, Table
from tests.training.comparing import COMMAND, made


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
    assert len((copy / "differences.csv").read_text().splitlines()) == 1 + 3 * 4
    assert json.loads((copy / "compare.json").read_text())["command"].startswith("cswe compare ")


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
    assert "+20.00 (0.00)" in table.markdown()


def test_a_pool_without_slices_is_compared_at_every_number_that_the_baseline_has():
    rows = {("swe", 4): [0.5, 0.6], ("swe", 16): [0.7, 0.8], ("mean", None): [0.4, 0.7], ("cswe", 16): [0.9, 0.9]}
    table = Table.of(made(rows), baseline="swe")
    found = [(entry.row.pool, entry.slices, round(entry.mean.mean, 6)) for entry in table.differences()]
    assert found == [("mean", 4, 0.0), ("mean", 16, -0.2), ("cswe", 16, 0.15)]
    differences = table.markdown().partition("against SWE")[2]
    assert [line.split("|")[1:3] for line in differences.splitlines() if "| GAP" in line] == [
        [" GAP     ", "  4 "],
        [" GAP     ", " 16 "],
    ]
    lines = list(csv.DictReader(table.differences_csv().splitlines()))
    assert [(line["pool"], line["slices"]) for line in lines[:3]] == [("mean", "4"), ("mean", "16"), ("cswe", "16")]
    assert Table.of(made({("mean", None): [0.5], ("swe", 4): [0.6]}), baseline="swe").differences()[0].slices == 4


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
