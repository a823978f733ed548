"""Killed at any touch of a file, not only where a random moment falls, training goes on to the same end.

There are hundreds of touches, and most come again every epoch: every third, fifth or eleventh is tried.
"""

import itertools
import json
import shutil

import pytest

from cswe.training.cells import read_results


def files(folder):
    """What lies in a folder; who was killed leaves locks that nobody holds, which do no harm."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.suffix != ".lock"}


def ended_at_touches(server, folder, *command, step):
    """Run a command, killed later and later and each time once more on the way; yield when it has come to its end."""
    for touches in itertools.count(0, step):
        shutil.rmtree(folder, ignore_errors=True)
        if server.run(*command, "--out", folder, touches=(folder, touches))["codes"] == [0]:
            break
        for again in (touches // 2, None):
            answer = server.run(*command, "--out", folder, touches=again and (folder, again))
        assert answer["codes"] == [0], answer["said"]
        yield touches
    assert touches > 20 * step


def test_a_run(server, digits, full, content, tmp_path):
    command = ["train", digits, "--resume", *full, "--epochs", "2"]
    assert server.run(*command, "--out", tmp_path / "whole")["codes"] == [0]
    whole, run = (content(tmp_path / "whole"), files(tmp_path / "whole")), tmp_path / "run"
    for touches in ended_at_touches(server, run, *command, step=5):
        assert (content(run), files(run)) == whole, touches


def test_a_comparison(server, digits, tmp_path):
    choices = ["epochs=2", "batch_size=64", "points=4"]
    command = ["compare", digits, "--pools", "mean", "swe", "--slices", "2", "--seeds", "1", "--device", "cpu"]
    command += ["--set", *choices]

    def scores(out):
        return {result.cell.name: result.scores for result in read_results(out)}

    assert server.run(*command, "--out", tmp_path / "whole")["codes"] == [0]
    whole, study = (scores(tmp_path / "whole"), files(tmp_path / "whole")), tmp_path / "study"
    for touches in ended_at_touches(server, study, *command, step=3):
        assert (scores(study), files(study)) == whole, touches


def test_a_search(server, digits, tmp_path):
    pytest.importorskip("optuna", reason="needs the extra 'train'")

    (tmp_path / "space.json").write_text(json.dumps({"lr": [0.01, 0.1]}))
    choices = ["pool=mean", "epochs=2", "batch_size=64"]
    command = ["sweep", digits, "--space", tmp_path / "space.json", "--set", *choices, "--device", "cpu"]

    def found(out):
        return (out / "trials.csv").read_text(), (out / "best.json").read_text(), files(out)

    assert server.run(*command, "--out", tmp_path / "whole")["codes"] == [0]
    search = tmp_path / "search"
    for touches in ended_at_touches(server, search, *command, step=11):
        assert found(search) == found(tmp_path / "whole"), touches
