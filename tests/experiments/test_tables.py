"""The page of results says what the results say, and nothing else."""

import re

import pytest

from cswe.training.cells import Cell, Result
from cswe.training.recipe import Recipe
from experiments.figures import main as draw
from experiments.headline import README, with_headline
from experiments.lookup import Results, gain_text, mean_text
from experiments.paper import TABLE1
from experiments.pools import FEW_RIVALS, IMAGE_RIVALS, POOLS, RAW_POOLS, with_choices
from experiments.records import RESULTS, add_result, read_study
from experiments.tables import PAGE, TABLES, TEMPLATE, render


def add(folder, study, pool, layer, slices, values, metric="top1", **facts):
    """Write results with these test scores, one a seed."""
    for seed, value in enumerate(values):
        cell = Cell(pool, layer, slices, seed, Recipe())
        scores = {split: {"top1": value, "top5": 1.0, metric: value} for split in ("train", "validation", "test")}
        told = {
            "task": "classification", "seconds": 12.0, "wall": 15.0, "memory": {"bytes": 2e9}, "commit": "abc",
            "machine": {"device": "H200"}, "versions": {"torch": "2.11"}, "processes": 8, **facts,
        }  # fmt: skip
        add_result(folder, study, Result(cell, 192, scores, told), {}, folder / "lock")


def test_the_page_is_what_the_results_make():
    made = render(TEMPLATE.read_text(encoding="utf-8"), Results(RESULTS))
    assert PAGE.read_text(encoding="utf-8") == made, "run `python -m experiments.tables`"
    readme = README.read_text(encoding="utf-8")
    assert readme == with_headline(readme, Results(RESULTS)), "run `python -m experiments.tables`"
    with pytest.raises(ValueError, match=r"README.md: expected the marks"):
        with_headline("no marks", Results(RESULTS))


def test_no_score_is_written_by_hand():
    prose = re.sub(r"\{\{.+?\}\}", "", TEMPLATE.read_text(encoding="utf-8"))
    assert not re.findall(r"\b\d\d\.\d+", prose)


def test_every_table_is_on_the_page_and_can_be_printed_without_results(tmp_path):
    template = TEMPLATE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        assert f"{{{{table {name}}}}}" in template
        lines = table(Results(tmp_path)).splitlines()
        assert len({line.count("|") for line in lines}) == 1


def test_numbers_stand_where_they_belong(tmp_path):
    add(tmp_path, "images-table1", "mean", 12, None, [0.60, 0.61, 0.62])
    add(tmp_path, "images-table1", "cswe", 12, 128, [0.58])
    lines = TABLES["images-table1"](Results(tmp_path)).splitlines()
    gap = next(line for line in lines if line.startswith("| 12") and "GAP" in line)
    for text in ("61.00 (1.00)", "60.19 (0.09)", "12 s", "2.0 GB", " 3 "):
        assert text in gap
    bounded = next(line for line in lines if line.startswith("| 12") and "C-SWE" in line)
    assert "58.00" in bounded
    assert str(TABLE1["cswe", 12][2]) in bounded


def test_the_papers_epochs_count_for_means_once_they_are_there(tmp_path):
    add(tmp_path, "images-table1", "mean", 6, None, [0.46, 0.47, 0.48])
    assert "| 30 |" in TABLES["images-table1"](Results(tmp_path)).replace("     30 |", " 30 |")
    assert "| 6" not in TABLES["images-epochs"](Results(tmp_path))
    add(tmp_path, "images-table1", "mean:epochs=80", 6, None, [0.50, 0.50])
    (line,) = [line for line in TABLES["images-table1"](Results(tmp_path)).splitlines() if line.startswith("| 6")]
    assert " 80 " in line
    assert "50.00 (0.00)" in line
    lines = TABLES["images-epochs"](Results(tmp_path)).splitlines()
    assert "46.50 (0.71)" in lines[2]  # the two seeds that both have
    assert " +3.50 ± 0.50 " in lines[3]  # seven times its error, which two seeds say little of


def test_differences_are_taken_seed_by_seed(tmp_path):
    ours, rival = POOLS["weighted"], POOLS["attention-5"]
    add(tmp_path, "images-tuned", ours.text, 12, 256, [0.70, 0.71, 0.72])
    add(tmp_path, "images-tuned", rival.text, 12, None, [0.69, 0.695, 0.705])
    add(tmp_path, "images-tuned", rival.text, 9, None, [0.69, 0.70, 0.70])
    add(tmp_path, "images-tuned", ours.text, 9, 256, [0.70, 0.71, 0.72])
    results = Results(tmp_path)
    rows = [results.row("images-tuned", named.text, 12, named.slices) for named in (ours, rival)]
    assert gain_text(*rows) == "**+1.33 ± 0.17**"
    # Four times its error: by chance alone three seeds say so in one case of twenty.
    assert render("{{gain images-tuned weighted attention-5 9}}", results).endswith("\n+1.33 ± 0.33")
    add(tmp_path, "images-table1", rival.text, 9, None, [0.60, 0.61, 0.61])
    other = render("{{gain images-tuned weighted images-table1/attention-5 9}}", Results(tmp_path))
    assert other.endswith("**+10.33 ± 0.33**")
    assert gain_text(rows[0], None) == "–"
    assert mean_text(rows[0], metric="nearest") == "–"
    text = render("{{score images-tuned weighted 12}}, {{gain images-tuned weighted attention-5 12}}", results)
    assert text.endswith("71.00 (1.00), **+1.33 ± 0.17**")
    assert render("{{score images-tuned:nearest weighted 12}}", results).endswith("\n–")
    assert "**+1.33 ± 0.17**" in TABLES["images-tuned-differences"](results)
    # Three splits of the same shapes, 30 % of them for testing and 50 % for training: √(1 + 3 · 0.6) times the error.
    overlapping = render("{{gain-overlap images-tuned weighted attention-5 12}}", results)
    assert overlapping.endswith("\n**+1.33 ± 0.28**")
    assert render("{{gain-overlap images-tuned weighted attention-5 9}}", results).endswith("\n+1.33 ± 0.56")
    assert render("{{swgg points-evolution swe:0.03 5 16}}", results).endswith("\n–")
    with pytest.raises(ValueError, match="expected table"):
        render("{{poem}}", results)


def test_what_has_no_results_is_left_out(tmp_path):
    template = "a\n\n{{if images-map}}\nb\n\n{{end}}\n{{if images-table1:epochs-80}}\nc\n{{end}}\n{{progress}}\n"
    empty = render(template, Results(tmp_path))
    assert "Not run yet: `images-clock`" in empty
    assert "b\n" not in empty
    add(tmp_path, "images-map", "swe", 6, 128, [0.5])
    add(tmp_path, "images-table1", "mean", 6, None, [0.5])
    made = render(template, Results(tmp_path))
    assert "a\n\nb\n\nStill to do." in made
    assert "`images-map` (1 of 12)" in made
    add(tmp_path, "images-table1", "mean:epochs=80", 6, None, [0.75])
    assert "c\n" in render(template, Results(tmp_path))
    assert render("{{gain images-table1 gap:80 gap 6}}", Results(tmp_path)).endswith("+25.00 (one seed)")
    for result in read_study(tmp_path, "images-table1").values():
        result.scores["validation"] = {"top1": 0.5}
        add_result(tmp_path, "images-table1", result, {}, tmp_path / "lock")
    assert render("{{gain images-table1:top1@validation gap:80 gap 6}}", Results(tmp_path)).endswith("+0.00 (one seed)")
    assert render("{{score images-table1:@validation gap:80 6}}", Results(tmp_path)).endswith("50.00")


def test_scores_of_points_are_balanced(tmp_path):
    add(tmp_path, "points-table", RAW_POOLS["cswe"].text, 0, 16, [0.5], metric="balanced")
    add(tmp_path, "points-table", RAW_POOLS["gap"].text, 0, None, [0.25], metric="balanced")
    text = render("{{score points-table cswe 0 16}} {{gain points-table cswe gap 0 16}}", Results(tmp_path))
    assert text.endswith("50.00 +25.00 (one seed)")
    assert "0.01" in TABLES["points-raw"](Results(tmp_path))  # the rate of each


def test_each_schedule_of_proteins_is_held_against_its_own(tmp_path):
    add(tmp_path, "proteins-table", "swe", 6, 16, [0.5])
    add(tmp_path, "proteins-table", "cswe", 6, 16, [0.25])
    add(tmp_path, "proteins-table", "swe:epochs=50", 6, 16, [0.75])
    add(tmp_path, "proteins-table", "cswe:epochs=50", 6, 16, [0.74])
    lines = [line for line in TABLES["proteins-table"](Results(tmp_path)).splitlines() if "C-SWE" in line][1:]
    assert ["-25.00" in line and "256, 20" in line for line in lines] == [True, False]
    assert ["-1.00" in line and "32, 50" in line for line in lines] == [False, True]


def test_epochs_are_compared_on_the_seeds_that_both_have(tmp_path):
    add(tmp_path, "images-table1", "cswe", 12, 128, [0.5])
    add(tmp_path, "images-table1", "cswe:epochs=80", 12, 128, [0.75, 0.25])
    table = TABLES["images-epochs"](Results(tmp_path))
    assert "75.00" in table
    assert "+25.00 (one seed)" in table


def test_few_labels_and_neighbours_have_their_rows(tmp_path):
    for key in IMAGE_RIVALS:
        named = POOLS[key]
        for count in (1, 5, 20):
            text = with_choices(named.text, f"labels_per_class={count}")
            add(tmp_path, "images-few", text, 12, named.slices, [count / 100])
        add(tmp_path, "images-tuned", named.text, 12, named.slices, [0.5], metric="nearest")
    few = TABLES["images-few"](Results(tmp_path))
    assert few.count("20.00") == len(FEW_RIVALS)
    assert TABLES["images-nearest"](Results(tmp_path)).count(" 50.00 ") == len(IMAGE_RIVALS)


def test_figures_are_drawn_from_results(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra 'report'")
    for slices in (4, 8):
        add(tmp_path, "proteins-table", "swe", 6, slices, [0.5, 0.6])
    add(tmp_path, "proteins-table", "mean", 6, None, [0.5])
    log = [{"epoch": epoch, "swgg_exact": [1.0, 2.0]} for epoch in (1, 2)]
    bounded = [{**line, "swgg": {"slack": [0.1, 0.0], "dual": [0.0, 1.0]}} for line in log]
    add(tmp_path, "proteins-evolution", "swe", 6, 16, [0.5], log=log)
    add(tmp_path, "proteins-evolution", "cswe:bound=5", 6, 16, [0.5], log=bounded)
    draw(["--results", str(tmp_path), "--out", str(tmp_path / "figures")])
    assert (tmp_path / "figures" / "proteins-slices.png").exists()
    evolution = tmp_path / "figures" / "proteins-evolution.svg"
    short = evolution.read_text()
    add(tmp_path, "proteins-evolution", "swe:epochs=50", 6, 16, [0.5], log=log[:1])
    draw(["--results", str(tmp_path), "--out", str(tmp_path / "figures")])
    assert evolution.read_text() == short  # some of the runs to the letter are missing
    add(tmp_path, "proteins-evolution", "cswe:bound=5,epochs=50", 6, 16, [0.5], log=bounded[:1])
    draw(["--results", str(tmp_path), "--out", str(tmp_path / "figures")])
    assert evolution.read_text() != short
    add(tmp_path, "images-table1", "swe", 12, 128, [0.5])
    draw(["--results", str(tmp_path), "--out", str(tmp_path / "figures")])
    assert not (tmp_path / "figures" / "images-slices.png").exists()  # one point is no line
    assert "images-slices: no results yet" in capsys.readouterr().out
