"""What is known already: kept and not run again, held against a second run, or made again on request."""

import json
from dataclasses import replace

import pytest

from cswe.training.cells import Plan
from experiments.extract import main as extract
from experiments.records import add_result, read_study
from experiments.run import main
from experiments.studies import STUDIES, Entry, Study
from experiments.tuning import IMAGES
from tests.experiments.small import TINY, study


def test_what_is_known_elsewhere_is_kept_and_not_run_again(work, tmp_path):
    first, _ = work(study(pools=("mean",)))
    first.run()
    second, _ = work(study(), out="later", known=[tmp_path / "out"])
    assert second.run() == 2
    assert len(read_study(tmp_path / "later", "small")) == 4
    lines = (tmp_path / "later" / "small.json").read_text().splitlines()
    assert len(lines) == 4 + 2  # one a cell
    assert json.loads("\n".join(lines))["study"] == "small"


def test_another_recipe_under_the_same_name_is_refused(work, stores, tmp_path):
    work(study(pools=("mean",)))[0].run()
    other = Plan(("mean",), (2,), 2, layers=(6,), choices=("epochs=2", *TINY[1:]))
    changed = Study("small", "proteins", lambda chosen: [Entry(other, 0, "sets")])
    with pytest.raises(ValueError, match=r"another recipe.*epochs"):
        work(changed)[0].run()


def test_again_says_whether_every_score_is_the_known_one(work, tmp_path):
    assert work(study(pools=("mean",)), deterministic=True)[0].run() == 2
    file = tmp_path / "out" / "small.json"
    before = file.read_text()
    again, told = work(study(), again=True)
    assert again.run() == 2  # of four, two are known
    assert again.failed == []
    assert [line.rsplit(": ", 1)[1] for line in told[:2]] == ["all 15 scores are the same"] * 2
    assert work(study(), again=True)[0].run() == 0  # once for all workers of a command
    assert file.read_text() == before
    first = next(iter(read_study(tmp_path / "out", "small").values()))
    first.scores["test"]["top1"] += 1e-12
    add_result(tmp_path / "other", "small", first, {}, tmp_path / "lock")
    wrong, told = work(study(), out="other", again=True, only=(first.cell.name,), work=tmp_path / "elsewhere")
    assert wrong.run() == 1
    assert wrong.failed == [first.cell.name]
    assert "differs in test top1: " in told[0]


def test_cells_of_an_old_commit_are_made_again_and_replaced(work, tmp_path, made_at):
    made_at("0ld0ld0ld0")
    assert work(study(pools=("mean",)))[0].run() == 2
    old = read_study(tmp_path / "out", "small")
    made_at("new0new0ne")
    assert work(study())[0].run() == 2  # the other pooling
    assert work(study(), again=True, remake=("0ld0ld0",))[0].run() == 2
    assert work(study(), remake=("0ther0th",))[0].run() == 0
    remaking, told = work(study(), remake=("0ld0ld0", "0ther0th"))
    assert remaking.run() == 2
    assert sum("; against 0ld0ld0 all 15 scores are the same)" in line for line in told) == 2
    found = read_study(tmp_path / "out", "small")
    assert {result.facts["commit"] for result in found.values()} == {"new0new0ne"}
    assert {name: found[name].scores for name in old} == {name: result.scores for name, result in old.items()}
    assert work(study(), remake=("0ld0ld0",))[0].run() == 0
    elsewhere = {"remake": ("new0new0",), "work": tmp_path / "elsewhere"}
    assert [work(study(), **elsewhere)[0].run() for _ in range(2)] == [4, 0]  # made by that very commit, and once
    made_at("later000000")
    assert work(study(), **{**elsewhere, "remake": ("new0new", "0ld0ld0")})[0].run() == 4


def test_what_is_known_elsewhere_is_remade_here(work, tmp_path, made_at):
    made_at("0ld0ld0ld0")
    assert work(study(), out="there")[0].run() == 4
    made_at("new0new0ne")
    options = {"known": [tmp_path / "there"], "remake": ("0ld0ld0",)}
    assert work(study(), only=("seed-1",), **options)[0].run() == 2
    assert work(study(), only=("seed-1",), **options)[0].run() == 0
    commits = [result.facts["commit"] for result in read_study(tmp_path / "out", "small").values()]
    assert sorted(commits) == ["0ld0ld0ld0"] * 2 + ["new0new0ne"] * 2


def test_final_runs_of_another_choice_are_made_again(work, tmp_path):
    def final(epochs):
        plan = Plan(("mean",), (2,), 1, layers=(6,), choices=(f"epochs={epochs}", *TINY[1:]))
        return Study("final", "proteins", lambda chosen: [Entry(plan, 0, "sets")], replace(IMAGES, sought=()))

    assert [work(final(epochs))[0].run() for epochs in (1, 1, 2, 2)] == [1, 0, 1, 0]
    assert [result.cell.recipe.optimization.epochs for result in read_study(tmp_path / "out", "final").values()] == [2]
    assert work(final(1), again=True)[0].run() == 0  # what is known is not of this recipe


@pytest.mark.parametrize(
    ("command", "words"),
    [(main, ["images-soft"]), (extract, ["raw-1", "--assets", "somewhere"])],
    ids=["run", "extract"],
)
def test_a_folder_that_is_not_there_is_not_one_where_nothing_is_known(command, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command([*words, "--stores", str(tmp_path), "--known", str(tmp_path / "resluts")])
    assert ended.value.code == 2
    assert (
        f"argument --known: expected a folder that is there but got {tmp_path / 'resluts'}" in capsys.readouterr().err
    )


def test_a_rerun_from_the_command_line(stores, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(STUDIES, "proteins-evolution", study("proteins-evolution", ("mean",), store="proteins"))
    words = ["proteins-evolution", "--stores", str(stores), "--out", str(tmp_path), "--known", "--device", "cpu"]
    assert main([*words, "--only", "nothing,seed-1"]) == 0
    (known,) = read_study(tmp_path, "proteins-evolution").values()
    assert main([*words, "--again", "--deterministic"]) == 0
    assert "scores are the same" in capsys.readouterr().out
    known.scores["train"]["top1"] = 2.0
    add_result(tmp_path, "proteins-evolution", known, {}, tmp_path / "lock")
    assert main([*words, "--again", "--only", "seed-0", "--only", "mean"]) == 1
    assert "train top1: 2.0 there" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--again", "--rehearse"])
    with pytest.raises(SystemExit):
        main([*words, "--remake", "abc"])
    assert "expected at least 7 digits of a commit but got 'abc'" in capsys.readouterr().err
    extraction = ["raw-0", "--assets", str(tmp_path), "--stores", str(stores), "--device", "abacus"]
    for command, wrong in ((main, [*words, "--device", "abacus"]), (extract, extraction)):
        with pytest.raises(SystemExit):
            command(wrong)
        assert "device: expected one that torch can use here, cpu say, but got 'abacus'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--remake", "HEAD~12345"])
    assert "but got 'HEAD~12345'" in capsys.readouterr().err
