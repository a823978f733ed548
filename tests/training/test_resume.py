"""A run is a function of its recipe, its store and its seed, whatever happens on the way."""

import json
import random
import shutil

import pytest
import torch

from cswe.cli import main
from cswe.tokens import TokenStore
from cswe.training import TrainingData, UserError, fit, recipe
from cswe.training.checkpoint import existing, remove_folder, replace_folder
from cswe.training.logging import JsonLines, read_lines


def test_killed_at_twenty_moments_and_resumed_is_the_run_that_was_not(server, digits, content, tmp_path, full):
    whole, full = tmp_path / "whole", [*full, "--epochs", "2"]
    answer = server.run("train", digits, "--out", whole, *full)
    assert answer["codes"] == [0], answer["said"]
    seconds, expected = answer["seconds"], content(whole)
    chance, kills, late = random.Random(0), 0, 0
    while kills < 20:
        run = tmp_path / f"run {kills}"
        moment = chance.uniform(0, 1.0) * seconds
        killed = server.run("train", digits, "--out", run, "--resume", *full, after=moment)
        if killed["codes"] == [0]:
            late += 1  # it was through already
            assert late < 40
            shutil.rmtree(run)
            continue
        assert killed["codes"] == [-9]
        kills += 1
        # Some are killed again, wherever they have got to.
        if kills % 3 == 0:
            server.run("train", digits, "--out", run, "--resume", *full, after=chance.uniform(0, 1.0) * seconds)
        assert server.run("train", digits, "--out", run, "--resume", *full)["codes"] == [0]
        assert content(run) == expected
        shutil.rmtree(run)


def test_killed_while_the_last_checkpoint_was_put_in_place(digits, content, tmp_path, full):
    words = ["train", str(digits), "--out", str(tmp_path / "run"), *full, "--epochs", "2"]
    assert main(words) == 0
    expected = content(tmp_path / "run")
    for name in ("best", "last"):
        for beside in ("old", "partial"):
            shutil.copytree(tmp_path / "run" / name, tmp_path / "run" / f"{name}.{beside}")
    assert main([*words, "--resume"]) == 0
    assert content(tmp_path / "run") == expected
    shutil.move(tmp_path / "run" / "last", tmp_path / "run" / "last.old")  # between the two renames
    assert main([*words, "--resume"]) == 0
    assert existing(tmp_path / "run" / "last") is not None


def test_two_runs_with_one_seed_are_identical_and_another_seed_is_not(digits, content, tmp_path, full):
    runs = [tmp_path / name for name in ("one", "two", "three")]
    for run, seed in zip(runs, (0, 0, 1), strict=True):
        torch.manual_seed(hash(run.name) % 1000)  # whatever the global generator says
        assert main(["train", str(digits), "--out", str(run), "--seed", str(seed), *full]) == 0
    assert content(runs[0]) == content(runs[1])
    assert content(runs[0])["best/model.safetensors"] != content(runs[2])["best/model.safetensors"]


def test_seeds_in_one_process_are_each_its_own_run(digits, content, tmp_path, full):
    assert main(["train", str(digits), "--out", str(tmp_path / "both"), "--seeds", "2", *full]) == 0
    for seed in (0, 1):
        alone = tmp_path / f"alone-{seed}"
        assert main(["train", str(digits), "--out", str(alone), "--seed", str(seed), *full]) == 0
        assert content(tmp_path / "both" / f"seed-{seed}") == content(alone)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_resumes_too(digits, content, tmp_path, precision):
    store = TokenStore(digits)
    chosen = recipe("digits").with_(
        slices=4, points=8, batch_size=32, epochs=3, bound_batches=2, precision=precision, optimizer="adamw"
    )

    def data():
        return TrainingData.open(store, chosen, torch.device("cpu"))

    assert len(list(fit(data(), tmp_path / "whole"))) == 3
    broken = fit(data(), tmp_path / "broken")
    next(broken)
    broken.close()
    assert [record["epoch"] for record in fit(data(), tmp_path / "broken", resume=True)] == [2, 3]
    assert content(tmp_path / "whole") == content(tmp_path / "broken")


def test_a_finished_run_resumes_to_nothing(trained, digits, content, capsys, tiny):
    before = content(trained)
    assert main(["train", str(digits), "--out", str(trained), "--resume", *tiny, "--profile"]) == 0
    assert "best epoch" in capsys.readouterr().out
    assert content(trained) == before


def test_killed_while_the_log_is_taken_back_nothing_is_lost(tmp_path, monkeypatch):
    log = JsonLines(tmp_path / "log.jsonl")
    for epoch in (1, 2, 3):
        log.write({"epoch": epoch})

    def killed(record):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("cswe.training.logging.json.dumps", killed)
        with pytest.raises(KeyboardInterrupt):
            JsonLines(tmp_path / "log.jsonl", 2)
    assert [line["epoch"] for line in read_lines(tmp_path / "log.jsonl")] == [1, 2, 3]
    JsonLines(tmp_path / "log.jsonl", 2)
    assert [line["epoch"] for line in read_lines(tmp_path / "log.jsonl")] == [1, 2]


def test_a_pool_that_cannot_be_made_claims_no_folder(digits, tmp_path, capsys, tiny):
    words = ["train", str(digits), "--out", str(tmp_path / "run"), *tiny, "--pool", "moments", "--slices", "4"]
    assert main([*words, "--readout", "moments:2:5"]) == 2
    assert "means along at most the pool's 4 slices but got 5" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "--readout", "moments:2:4"]) == 0


def test_another_recipe_seed_or_store_is_refused(trained, digits, make_store, tmp_path, capsys, tiny):
    def train(*arguments, store=digits):
        return main(["train", str(store), "--out", str(trained), *tiny, *arguments])

    assert train() == 2
    assert "holds a run already; go on with it by --resume" in capsys.readouterr().err
    assert train("--resume", "--lr", "0.5") == 2
    assert "begun with another recipe (lr: 0.01 there, 0.5 now)" in capsys.readouterr().err
    assert train("--resume", "--seed", "3") == 2
    assert "begun with seed 0 but got 3" in capsys.readouterr().err
    other = make_store(tmp_path / "other", [0, 1, 2] * 8, classes=["a", "b", "c"])
    assert train("--resume", store=other.path) == 2
    assert "begun on another store" in capsys.readouterr().err
    same = make_store(tmp_path / "same", [0, 1, 2] * 8, classes=["a", "b", "c"], seed=1)  # in all but the tokens
    assert main(["train", str(other.path), "--out", str(tmp_path / "run"), *tiny]) == 0
    assert main(["train", str(same.path), "--out", str(tmp_path / "run"), *tiny, "--resume"]) == 2
    assert "begun on another store" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("do not touch")
    assert main(["train", str(digits), "--out", str(tmp_path / "full"), *tiny]) == 2
    assert "expected an empty folder" in capsys.readouterr().err


def test_one_process_at_a_time(digits, tmp_path, monkeypatch):
    chosen = recipe("digits").with_(pool="mean", epochs=2)
    data = TrainingData.open(TokenStore(digits), chosen, "cpu")
    first = fit(data, str(tmp_path / "run"))  # names are as good as what they name
    next(first)
    with pytest.raises(UserError, match=r"this process is training there in an earlier loop.*close\(\) that first"):
        next(fit(data, tmp_path / "run", resume=True))
    monkeypatch.setattr("cswe.training.locking.os.getpid", lambda: 0)
    with pytest.raises(UserError, match="another process is training there"):
        next(fit(data, tmp_path / "run", resume=True))
    first.close()
    assert len(list(fit(data, tmp_path / "run", resume=True))) == 1
    assert not (tmp_path / "run" / "lock").exists()


def test_killed_before_the_recipe_was_written(digits, tmp_path, tiny):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json.partial").write_text("{")
    assert main(["train", str(digits), "--out", str(tmp_path / "run"), "--resume", *tiny]) == 0


def test_a_folder_is_there_whole_at_every_moment(tmp_path):
    target = tmp_path / "last"

    def write(text):
        return lambda folder: (folder / "file").write_text(text) and None

    replace_folder(target, write("one"))
    replace_folder(target, write("two"))
    assert (target / "file").read_text() == "two"
    # Killed between the two renames.
    target.rename(tmp_path / "last.old")
    assert (existing(target) / "file").read_text() == "two"

    # Killed while writing.
    def fail(folder):
        (folder / "file").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_folder(target, fail)
    assert (existing(target) / "file").read_text() == "two"
    replace_folder(target, write("three"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last"]


def test_two_processes_train_what_one_does(server, digits, launched, tmp_path, tiny):
    choices = [*tiny, "--normalization", "none", "--keep-tokens", "1"]
    assert server.run("train", digits, "--out", tmp_path / "one", *choices)["codes"] == [0]
    answer = server.run("train", digits, "--out", tmp_path / "two", *choices, environments=launched())
    assert answer["codes"] == [0, 0], answer["said"]
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for one, two in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
        assert one["swgg"]["dual"] == pytest.approx(two["swgg"]["dual"], rel=1e-2, abs=1e-5)


def test_two_processes_killed_amid_an_epoch_go_on_to_the_bit(server, digits, launched, content, tmp_path, full):
    words = ["train", digits, *full, "--epochs", "2", "--resume", "--save-steps", "4", "--out"]
    assert server.run(*words, tmp_path / "whole", environments=launched())["codes"] == [0, 0]
    amid = 0
    for number in range(10):
        run = tmp_path / f"run {number}"
        saved = run / "last" / "training.json"
        server.run(*words, run, when=saved, after=0, environments=launched())
        amid = json.loads((existing(run / "last") / saved.name).read_text())["progress"]["step"]
        assert server.run(*words, run, environments=launched())["codes"] == [0, 0]
        assert content(run) == content(tmp_path / "whole")
        if amid:
            break
    assert amid


def test_fewer_sets_than_processes_are_told(server, digits, launched, tmp_path, tiny):
    words = ["train", digits, "--out", tmp_path / "run", *tiny, "--batch-size", "1"]
    answer = server.run(*words, environments=launched())
    assert answer["codes"] == [2, 2]
    assert "batch_size: expected at least 2, one set for every process, but got 1" in answer["said"][0]
    assert not (tmp_path / "run").exists()


def test_a_folder_is_removed_whole_at_every_moment(tmp_path, monkeypatch):
    target = tmp_path / "last"
    replace_folder(target, lambda folder: (folder / "file").write_text("one") and None)

    def killed(folder, **options):
        for file in folder.glob("*"):
            file.unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_folder(target)
    assert existing(target) is None
    target.mkdir()
    target.rename(tmp_path / "last.old")  # killed between the two renames of an earlier write
    remove_folder(target)
    assert list(tmp_path.iterdir()) == []
