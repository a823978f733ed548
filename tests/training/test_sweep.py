"""A sweep: every point once, whatever happens on the way, shared between processes; the best as a recipe."""

import csv
import importlib
import json
import random
import shutil
from contextlib import closing

import pytest

from cswe.cli import main
from cswe.training import recipe
from cswe.training.errors import UserError
from cswe.training.recipe import Recipe
from cswe.training.space import Range, Space
from cswe.training.sweep import best_line, sweep
from cswe.training.trials import Trials

pytest.importorskip("optuna", reason="needs the extra 'train'")

TINY = {"epochs": 2, "batch_size": 64, "slices": 2, "points": 8, "bound_batches": 2}
BASE = recipe("digits").with_(**TINY)
GRID = {"bound": [0.8, 0.9], "lr": [0.001, 0.01], "slack_weight": [0.1, 1.0], "dual_lr": [0.01, 0.1]}


@pytest.fixture(scope="module")
def space_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("space") / "space.json"
    file.write_text(json.dumps(GRID))
    return file


@pytest.fixture(scope="module")
def command(digits, space_file):
    choices = [f"{name}={value}" for name, value in TINY.items()]
    return ["sweep", str(digits), "--space", str(space_file), "--set", *choices, "--device", "cpu"]


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "whole"
    best = sweep(digits, folder, BASE, Space.of(GRID), device="cpu")
    return folder, best


def rows(folder):
    with (folder / "trials.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def values(folder, names=tuple(GRID)):
    return {tuple(row[name] for name in ("run", *names, "validation", "epochs_done")) for row in rows(folder)}


def stamps(folder):
    """What changes when a run is trained again."""
    return {
        file: (file.stat().st_mtime_ns, file.stat().st_ino)
        for row in rows(folder)
        for file in (folder / "runs" / row["run"]).glob("seed-*/log.jsonl")
    }


def epochs(folder):
    """The epochs that every run's log tells of."""
    logs = folder.glob("runs/*/seed-*/log.jsonl")
    return [[json.loads(line)["epoch"] for line in log.read_text().splitlines()] for log in logs]


def test_a_grid_is_searched_whole_and_the_best_is_a_recipe(whole, digits, tmp_path):
    folder, best = whole
    found = rows(folder)
    assert len(found) == 16
    assert {row["state"] for row in found} == {"complete"}
    assert len({tuple(row[name] for name in GRID) for row in found}) == 16
    top = max(found, key=lambda row: float(row["validation"]))
    assert (best.bounding.bound, best.optimization.lr) == (float(top["bound"]), float(top["lr"]))
    assert Recipe.from_json(json.loads((folder / "best.json").read_text())) == best
    out = tmp_path / "run"
    arguments = ["train", str(digits), "--recipe", str(folder / "best.json"), "--out", str(out), "--quiet"]
    assert main([*arguments, "--device", "cpu"]) == 0
    trained = json.loads((out / "recipe.json").read_text())["recipe"]
    assert Recipe.from_json(trained) == best
    score = json.loads((out / "result.json").read_text())["validation"]["top1"]
    assert score == pytest.approx(float(top["validation"])), "the recipe should give the score that it was chosen for"
    assert not list(folder.glob("runs/*/seed-*/best"))


def test_a_second_time_nothing_is_trained(whole, digits):
    folder, best = whole
    before, told = stamps(folder), []
    assert sweep(digits, folder, BASE, Space.of(GRID), device="cpu", tell=told.append) == best
    assert told == []
    assert stamps(folder) == before


def test_killed_at_any_moment_nothing_is_lost_and_nothing_done_twice(server, whole, command, tmp_path):
    reference, _ = whole
    answer = server.run(*command, "--out", tmp_path / "timed")
    assert answer["codes"] == [0], answer["said"]
    assert values(tmp_path / "timed") == values(reference)
    chance, kills, saved, folder, seconds = random.Random(3), 0, 0, tmp_path / "killed", answer["seconds"]
    for _ in range(20):
        code = server.run(*command, "--out", folder, after=chance.uniform(0.3, 0.8) * seconds)["codes"][0]
        if code == 0 and not kills:  # it is faster than it was
            shutil.rmtree(folder)
            seconds /= 2
            continue
        if code == 0:
            break
        assert code == -9
        kills += 1
        before = stamps(folder) if (folder / "trials.csv").exists() else {}
        saved += len(before)
        again = server.run(*command, "--out", folder, after=chance.uniform(0.3, 0.8) * seconds)
        after = stamps(folder) if (folder / "trials.csv").exists() else {}
        assert {file: after[file] for file in before} == before, "a finished trial was done again"
        if again["codes"] == [0]:
            break
    done = server.run(*command, "--out", folder)
    assert done["codes"] == [0], done["said"]
    assert kills
    assert saved, "some trial should have been finished before a kill"
    assert values(folder) == values(reference)
    assert epochs(folder) == [[1, 2]] * 16


@pytest.mark.parametrize("by_launcher", [False, True])
def test_two_processes_share_the_work(server, launched, whole, command, tmp_path, by_launcher):
    reference, _ = whole
    folder = tmp_path / "shared"
    answer = server.run(*command, "--out", folder, environments=launched() if by_launcher else ({}, {}))
    assert answer["codes"] == [0, 0], answer["said"]
    assert values(folder) == values(reference)
    assert epochs(folder) == [[1, 2]] * 16
    trials = Trials(folder, Space.of(GRID), "grid", 1, "none", 2, 0).settled()
    workers = [trial.user_attrs["process"] for trial in trials]
    assert len(set(workers)) == 2
    assert len(trials) == 16


def test_two_hands_on_one_journal_never_take_the_same_trial(tmp_path):
    space = Space.of({"lr": [0.1, 0.2, 0.3, 0.4, 0.5]})
    hands = [Trials(tmp_path, space, "grid", 1, "none", 2, 0) for _ in range(2)]
    taken = []
    while (held := hands[len(taken) % 2].next()) is not None:
        taken.append(held)
    assert sorted(held.choices["lr"] for held in taken) == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert hands[0].under_way() == 5
    for held in taken[:3]:
        hands[0].finish(held, held.choices["lr"])
    # The others' process is gone: their locks are free.
    for held in taken[3:]:
        held.lock.release()
    again = [hands[1].next(), hands[1].next()]
    assert {held.run for held in again} == {held.run for held in taken[3:]}
    assert {held.choices["lr"] for held in again} == {held.choices["lr"] for held in taken[3:]}
    assert hands[1].next() is None
    for held in again:
        hands[1].finish(held, held.choices["lr"])
    assert len(hands[0].settled()) == 5
    assert hands[0].best().value == 0.5


def test_a_torn_line_in_the_journal_is_taken_off(tmp_path):
    space = Space.of({"lr": [0.1, 0.2]})
    held = Trials(tmp_path, space, "grid", 1, "none", 2, 0).next()
    held.lock.release()
    with (tmp_path / "journal.log").open("a") as stream:
        stream.write('{"op_code": 4, "worker')
    trials = Trials(tmp_path, space, "grid", 1, "none", 2, 0)
    for _ in range(2):
        trials.finish(trials.next(), 0.5)
    assert trials.next() is None
    assert len(Trials(tmp_path, space, "grid", 1, "none", 2, 0).settled()) == 2


def test_ranges_are_searched_with_pruning_and_the_number_of_trials_can_grow(digits, tmp_path):
    space = Space.of({"lr": {"low": 1e-4, "high": 0.1, "log": True}, "slices": {"low": 1, "high": 4}})
    start = BASE.with_(pool="swe", epochs=6)
    sweep(digits, tmp_path / "tpe", start, space, trials=4, device="cpu")
    first = rows(tmp_path / "tpe")
    assert len(first) == 4
    sweep(digits, tmp_path / "tpe", start, space, trials=9, device="cpu")
    found = rows(tmp_path / "tpe")
    assert found[:4] == first
    assert len(found) == 9
    assert all(1e-4 <= float(row["lr"]) <= 0.1 and row["slices"] in "1234" for row in found)
    pruned = [row for row in found if row["state"] == "pruned"]
    assert pruned, "with rates this far apart, some trial should be worse than the median"
    assert all(int(row["epochs_done"]) < 6 for row in pruned)
    # What is proposed is decided by the seed and the trials so far.
    sweep(digits, tmp_path / "again", start, space, trials=9, device="cpu")
    assert rows(tmp_path / "again") == found


def test_seeds_are_averaged(digits, tmp_path):
    sweep(digits, tmp_path / "both", BASE, Space.of({"lr": [0.01]}), seeds=2, device="cpu")
    alone = []
    for seed in (0, 1):
        sweep(digits, tmp_path / f"{seed}", BASE, Space.of({"lr": [0.01]}), first_seed=seed, device="cpu")
        alone.append(float(rows(tmp_path / f"{seed}")[0]["validation"]))
    assert float(rows(tmp_path / "both")[0]["validation"]) == pytest.approx(sum(alone) / 2)


def interrupted(monkeypatch, *arguments, **options):
    """Search, and be interrupted in the second seed's second epoch; return what was raised, as a notebook keeps it."""
    module = importlib.import_module("cswe.training.sweep")
    whole = module.fit

    def broken(data, run, *, seed, **given):
        with closing(whole(data, run, seed=seed, **given)) as records:
            for record in records:
                if seed == 1 and record["epoch"] == 2:
                    raise KeyboardInterrupt
                yield record

    with monkeypatch.context() as patched:
        patched.setattr(module, "fit", broken)
        with pytest.raises(KeyboardInterrupt) as stop:
            sweep(*arguments, **options)
    return stop


def reports(folder, space, epochs):
    """The scores of every epoch that trials were told of."""
    trials = Trials(folder, space, "grid", 1, "none", epochs, 0).settled()
    return [trial.intermediate_values for trial in trials]


def test_interrupted_between_two_seeds_the_same_process_goes_on_with_the_same_scores(digits, tmp_path, monkeypatch):
    space, start = Space.of({"lr": [0.01]}), BASE.with_(pool="mean", epochs=4)
    sweep(digits, tmp_path / "whole", start, space, seeds=2, device="cpu")
    kept = interrupted(monkeypatch, digits, tmp_path / "broken", start, space, seeds=2, device="cpu")
    monkeypatch.setattr("cswe.training.sweep.sleep", lambda seconds: pytest.fail("nobody else is at work"))
    sweep(digits, tmp_path / "broken", start, space, seeds=2, device="cpu")
    assert kept.value.__traceback__
    # Pruning goes by them: an epoch that one seed has and the other lacks is no epoch yet.
    assert reports(tmp_path / "broken", space, 4) == reports(tmp_path / "whole", space, 4)
    assert values(tmp_path / "broken", ["lr"]) == values(tmp_path / "whole", ["lr"])


def test_a_failed_trial_is_told_and_not_tried_again(digits, tmp_path):
    told = []
    space = Space.of({"dual_limit": [1e-9, 1e4]})
    best = sweep(digits, tmp_path / "s", BASE.with_(bound=0.1, epochs=3), space, device="cpu", tell=told.append)
    assert best.bounding.dual_limit == 1e4
    assert {row["state"] for row in rows(tmp_path / "s")} == {"fail", "complete"}
    assert any("ran away" in line for line in told)
    told.clear()
    sweep(digits, tmp_path / "s", BASE.with_(bound=0.1, epochs=3), space, device="cpu", tell=told.append)
    assert told == []


def test_a_point_that_cannot_be_trained_fails_alone(digits, tmp_path):
    """One by rates that no number holds, one by an argument that is told only when it is used."""
    found = []
    for space in ({"lr": [0.01, 1e20]}, {"slack_factor": [1.0, -1.0]}):
        folder = tmp_path / next(iter(space))
        start = BASE.with_(head="mlp", batch_size=2000)
        sweep(digits, folder, start, Space.of(space), device="cpu")
        found += [(row["state"], row["error"]) for row in rows(folder)]
        assert sweep(digits, folder, start, Space.of(space), device="cpu", tell=pytest.fail)
        assert "best of 2 trials, 0 of them pruned and 1 failed" in best_line(folder)
    assert [state for state, _ in found] == ["complete", "fail"] * 2
    assert "not finite" in found[1][1]
    assert "slack_schedule" in found[3][1], found


def test_a_fault_of_the_folder_is_no_fault_of_a_trial(digits, tmp_path):
    (tmp_path / "runs" / "00000" / "seed-0").mkdir(parents=True)
    (tmp_path / "runs" / "00000" / "seed-0" / "mine.txt").touch()
    with pytest.raises(UserError, match="there are files in it"):
        sweep(digits, tmp_path, BASE.with_(pool="mean"), Space.of({"lr": [0.01]}), device="cpu")


def test_epochs_can_be_searched(digits, tmp_path):
    sweep(digits, tmp_path, BASE.with_(pool="mean"), Space.of({"epochs": [1, 2]}), device="cpu")
    assert [(row["epochs"], row["epochs_done"]) for row in rows(tmp_path)] == [("1", "1"), ("2", "2")]
    assert "epochs=" in best_line(tmp_path)


def test_another_search_or_store_in_the_same_folder_is_refused(whole, command, make_store, tmp_path, capsys):
    folder, _ = whole
    assert main([*command, "--out", str(folder), "--seeds", "2"]) == 2
    assert "begun with another seeds" in capsys.readouterr().err
    space, start = Space.of({"lr": [0.01]}), BASE.with_(pool="mean", epochs=1)
    stores = [make_store(tmp_path / f"{n}", [n % 3 for n in range(60)], seed=n).path for n in (0, 1)]
    sweep(stores[0], tmp_path / "s", start, space, device="cpu")
    with pytest.raises(UserError, match="begun with another store"):
        sweep(stores[1], tmp_path / "s", start, space, device="cpu")
    plan = json.loads((tmp_path / "s" / "sweep.json").read_text())
    plan["tokens"] = plan.pop("store")["key"]  # as earlier versions wrote it
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(plan))
    assert sweep(stores[0], tmp_path / "s", start, space, device="cpu", tell=pytest.fail)


def test_the_command_says_what_it_found(whole, command, capsys):
    folder, _ = whole
    assert main([*command, "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "best of 16 trials" in printed
    assert "best.json" in printed


def test_a_choice_that_is_no_value_is_told(digits, tmp_path):
    sweep(digits, tmp_path, BASE.with_(pool="mean"), Space.of({"clip": [None]}), device="cpu")
    assert "clip=None;" in best_line(tmp_path)


def test_spaces():
    assert Space.open("paper", recipe("images")).size == 216
    assert Space.open("paper", recipe("proteins")).size == 16
    with pytest.raises(UserError, match="not for recipe 'digits'"):
        Space.open("paper", recipe("digits"))
    for wrong in (
        {},
        {"speed": [1]},
        {"lr": []},
        {"lr": 3},
        {"lr": [1, 1]},
        {"lr": ["quick"]},
        {"epochs": [2.5]},
        {"lr": {"low": 1}},
        {"lr": {"low": 2, "high": 1}},
        {"lr": {"low": "a", "high": "b"}},
        {"slices": {"low": 1.5, "high": 3}},
        {"slices": {"low": 1, "high": 8, "step": 0}},
        {"readout": {"low": 1, "high": 8}},
        {"pool": {"low": "a", "high": "b"}},
        {"standardize": {"low": 0, "high": 1}},
        {"lr": {"low": 0.1, "high": 1.0, "log": "false"}},
    ):
        with pytest.raises(UserError):
            Space.of(wrong)
    space = Space.of({"lr": {"low": 0.1, "high": 1.0}, "slices": {"low": 1, "high": 4}})
    assert space.choices["slices"] == Range(1, 4, whole=True)
    assert Space.of({"early_stop": {"low": 1, "high": 4}}).choices["early_stop"].whole
    assert Space.of(space.to_json()) == space
    assert not space.listed
    with pytest.raises(UserError, match="is a range"):
        list(space.grid())


def test_a_point_that_makes_no_sense_is_refused_before_anything_is_trained(digits, tmp_path):
    with pytest.raises(UserError, match="bound"):
        sweep(digits, tmp_path / "s", BASE, Space.of({"bound": [0.9, -1.0]}), device="cpu")
    with pytest.raises(UserError, match="CLS"):
        sweep(digits, tmp_path / "s", BASE, Space.of({"pool": ["mean", "cls"]}), device="cpu")
    with pytest.raises(ValueError, match="moments:x"):
        sweep(digits, tmp_path / "s", BASE, Space.of({"readout": ["moments:2", "moments:x"]}), device="cpu")
    assert not (tmp_path / "s").exists()
