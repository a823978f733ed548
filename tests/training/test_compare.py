"""A comparison: every cell once, whatever happens on the way."""

import json
import os
import random
import shutil
from dataclasses import replace

import pytest

from cswe.cli import main
from cswe.training.cells import Plan, read_results
from cswe.training.compare import compare
from cswe.training.locking import Lock
from cswe.training.recipe import Recipe
from cswe.training.table import Table
from tests.training.comparing import COMMAND, PLAN, TINY, numbers, stamps


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


def test_a_cell_that_cannot_be_trained_fails_alone(digits, tmp_path):
    """By an argument that is told only when it is used."""
    plan = Plan(("cswe:slack_factor=-1", "mean"), (2,), seeds=1, choices=tuple(TINY))
    failed, other = compare(digits, tmp_path, plan, device="cpu")
    assert "slack_schedule" in failed.error
    assert other.error is None


def test_a_failed_run_is_said_in_the_table_and_can_be_tried_again(digits, tmp_path, capsys):
    plan = Plan(("cswe",), (2,), seeds=2, choices=(*TINY, "bound=0.1", "dual_limit=1e-9"))
    results = compare(digits, tmp_path / "study", plan, device="cpu")
    assert all("ran away" in (result.error or "") for result in results)
    words = ["compare", str(digits), "--out", str(tmp_path / "study"), "--pools", *plan.pools, "--slices", "2"]
    assert main([*words, "--seeds", "2", "--set", *plan.choices, "--device", "cpu", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert f"no run of {tmp_path / 'study'} came to an end with a score; the files in" in said
    assert "2 of 2 runs failed" in Table.of(read_results(tmp_path / "study")).markdown()
    told = []
    compare(digits, tmp_path / "study", plan, device="cpu", tell=told.append)
    assert told == ["2 of 2 cells are there already"]
    compare(digits, tmp_path / "study", plan, device="cpu", tell=told.append, retry=True)
    assert len(told) == 3


def test_more_jobs_give_the_same_table(whole, digits, tmp_path, monkeypatch):
    _, results, _ = whole
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["compare", str(digits), "--out", str(tmp_path / "two"), *COMMAND, "--jobs", "2", "--quiet"]) == 0
    assert numbers(read_results(tmp_path / "two")) == numbers(results)


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
