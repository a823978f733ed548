"""The harness of the experiments: every cell once, by priority, whatever breaks down or runs out of time."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cswe.training.cells import Plan
from cswe.training.fit import fit
from experiments import worker as worker_module
from experiments.expect import Sizes, expected_seconds
from experiments.pools import with_choices
from experiments.records import RESULTS, read_study
from experiments.run import main, share
from experiments.studies import LITERAL, STUDIES, Entry, Study
from experiments.tuning import IMAGES, chosen_by
from experiments.worker import BROKEN, Worker
from tests.experiments.small import TINY, study

ROOT = Path(__file__).resolve().parents[2]


def test_every_cell_once_and_what_it_was_made_with(work, tmp_path):
    worker, told = work(study(neighbors=True), command="python -m experiments.run small", jobs=3, beside=4)
    assert worker.run() == 4
    found = read_study(tmp_path / "out", "small")
    assert len(found) == 4
    for result in found.values():
        assert set(result.scores) == {"train", "validation", "test"}
        assert "nearest" in result.scores["test"]
        for name in ("seconds", "wall", "memory", "machine", "versions", "commit", "command", "processes"):
            assert name in result.facts
        assert result.facts["processes"] == 7  # those of other commands slow it down as much
    assert sum("expected" in line for line in told) == 4
    assert not list((tmp_path / "work" / "runs").glob("*/*"))
    again, told = work(study(neighbors=True))
    assert again.run() == 0
    assert told == ["worker 0: nothing left to begin"]


def test_a_long_cell_is_broken_off_and_gone_on_with(work, tmp_path, monkeypatch):
    plan = Plan(("swe",), (2,), 1, layers=(6,), choices=("epochs=4", *TINY[1:]))
    long = Study("long", "proteins", lambda chosen: [Entry(plan, 0, "sets")])
    assert work(long, out="at-once", work=tmp_path / "elsewhere")[0].run() == 1
    monkeypatch.setattr(worker_module, "_LONG", 0)
    opened = Worker._opened

    def late(worker, task):
        worker.until = 0.0  # while the cell is under way
        return opened(worker, task)

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "_opened", late)
        worker, told = work(long, pause=True)
        assert worker.run() == 0
    assert "broken off after 1 epochs" in told[0]
    assert told[1] == "worker 0: no time left for another cell"
    worker, told = work(long)
    assert worker.run() == 1
    (parts,), (whole,) = (read_study(tmp_path / out, "long").values() for out in ("out", "at-once"))
    assert parts.scores == whole.scores
    assert parts.facts["epochs"] == whole.facts["epochs"] == 4
    assert not list((tmp_path / "work" / "runs").glob("*/*"))


def test_a_run_that_was_killed_is_begun_anew(work, tmp_path):
    plan = Plan(("mean",), (2,), 1, layers=(6,), choices=TINY)
    (cell,) = plan.cells([6])
    best = tmp_path / "work" / "runs" / "long" / cell.name / "best"
    best.mkdir(parents=True)
    (best / "damaged").touch()
    assert work(Study("long", "proteins", lambda chosen: [Entry(plan, 0, "sets")]))[0].run() == 1


def test_waves_are_done_in_order_and_at_home_first(work, monkeypatch):
    monkeypatch.setattr(worker_module, "_HOMES", ("proteins",))
    late, soon = study("late", ("mean",), wave=3), study("soon", ("mean",), wave=1)
    away = Study(
        "away", "images", lambda chosen: [Entry(Plan(("mean",), (2,), 1, layers=(6,), choices=TINY), 0, "sets")]
    )
    worker, told = work(away, late, soon)
    worker.run()
    order = [line.split("] ")[1].split(":")[0] for line in told if "expected" in line]
    assert order == ["soon", "soon", "late", "late", "away"]


def test_of_one_wave_the_longest_are_begun_first(work):
    worker, told = work(study())
    worker.run()
    pools = [line.split(": ")[1].split(",")[0] for line in told if "expected" in line]
    assert pools == ["SWE", "SWE", "GAP", "GAP"]


def test_only_some_cells(work, tmp_path):
    assert work(study(), only=("swe", "nothing"))[0].run() == 2
    assert {result.cell.pool for result in read_study(tmp_path / "out", "small").values()} == {"swe"}
    assert work(study(), only=("layer-6.seed-1",))[0].run() == 1
    assert work(study(), only=("set",))[0].run() == 1  # what is left, by the store's name


def test_no_cell_is_begun_that_would_not_end_in_time(work):
    worker, told = work(study(), until=time.monotonic() + 1)
    assert worker.run() == 0
    assert told == ["worker 0: no time left for another cell"]


def test_what_is_still_to_run_is_listed(work, stores, tmp_path, capsys, monkeypatch):
    assert work(study(pools=("mean",)))[0].run() == 2
    worker, told = work(study(), study("late", wave=3, store="missing"))
    lines = worker.outlook()
    assert [line.split()[1] for line in lines[:-1]] == ["0"] * 2 + ["3"] * 4
    assert "small: swe.layer-6.slices-2.seed-0" in lines[0]
    assert lines[-1].startswith("6 cells, ")
    assert lines[-1].endswith("4 of them on stores that are not there")
    assert told == []
    for known, cells in ([], 6), ([str(RESULTS)], 6 - len(read_study(RESULTS, "proteins-evolution"))):
        (tmp_path / "temporary").mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        words = ["proteins-evolution", "--stores", str(stores), "--out", str(tmp_path), "--known", *known]
        assert main([*words, "--list", "--jobs", "4"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"{cells} cells, ")
        assert not list((tmp_path / "temporary").iterdir())


def test_what_a_search_found_is_noted_if_it_was_not(scored, work, tmp_path, monkeypatch):
    found = {task.cell.name: scored(task.cell, 0.5) for task in STUDIES["images-tuning"].tasks({})}
    known = worker_module.read_all
    monkeypatch.setattr(
        worker_module, "read_all", lambda folders, name: found if name == "images-tuning" else known(folders, name)
    )
    plan = Plan(("mean",), (2,), 1, layers=(6,), choices=TINY)
    final = Study("final", "images", lambda chosen: [Entry(plan, 0, "sets")] if chosen else [], IMAGES)
    assert work(final)[0].run() == 1
    assert chosen_by(IMAGES, [tmp_path / "out"])[9, "weighted", None] == IMAGES.grid[0]


def test_without_a_search_nothing_is_waited_for(work):
    worker, told = work(STUDIES["images-tuned"])
    assert worker.run() == 0
    assert told == ["worker 0: nothing left to begin"]


@pytest.mark.parametrize("mistake", [RuntimeError, ValueError])
def test_a_cell_that_breaks_down_does_not_stop_the_others(work, monkeypatch, tmp_path, mistake):
    """And is no result, so that the next command tries it again."""

    def breaks(data, run, **options):
        if "mean.layer-6.seed-0" in run.name:
            raise mistake("out of memory")
        return fit(data, run, **options)

    monkeypatch.setattr("cswe.training.compare.fit", breaks)
    worker, told = work(study())
    assert worker.run() == 3
    assert worker.failed == ["mean.layer-6.seed-0"]
    assert any("out of memory" in line for line in told)
    assert len(read_study(tmp_path / "out", "small")) == 3


def test_logs_are_kept_where_they_are_drawn(work, tmp_path):
    work(study(pools=("swe", "cswe"), keep_log=True, test=False))[0].run()
    for result in read_study(tmp_path / "out", "small").values():
        assert "test" not in result.scores
        record = result.facts["log"][0]
        assert len(record["swgg_exact"]) == 2
        assert ("swgg" in record) == (result.cell.pool == "cswe")


def test_longer_runs_are_expected_to_take_longer(stores):
    sizes = Sizes.of(stores / "sets")
    assert (sizes.train, sizes.validation, sizes.classes, sizes.dims) == (36, 18, 3, {6: 4})
    recipe = study().tasks({})[-1].cell.recipe
    short = expected_seconds(recipe, 6, sizes)
    assert short < expected_seconds(recipe.with_(epochs=30), 6, sizes)
    bounded = recipe.with_(pool="cswe", slices=64, batch_size=1024)
    assert expected_seconds(bounded, 6, sizes) > expected_seconds(bounded.with_(pool="swe"), 6, sizes)


def test_two_processes_share_a_study(stores, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CSWE_BACKEND", "scan")
    words = ["proteins-evolution", "--stores", str(stores), "--out", str(tmp_path / "out"), "--known", "--jobs", "2"]
    assert main([*words, "--device", "cpu", "--rehearse"]) == 0
    found = read_study(tmp_path / "out", "proteins-evolution")
    pools = ["cswe:bound=10", "cswe:bound=5", "swe"]
    assert {result.cell.pool for result in found.values()} == {*pools, *(with_choices(pool, LITERAL) for pool in pools)}
    assert all("--jobs 2" in result.facts["command"] for result in found.values())


def test_a_worker_whose_device_is_broken_is_replaced(work, monkeypatch, tmp_path):
    monkeypatch.setattr(worker_module, "run_cell", lambda *words, **options: 1 / 0)
    monkeypatch.setattr(worker_module, "_usable", lambda device: False)
    worker, _ = work(study())
    with pytest.raises(SystemExit) as ended:
        worker.run()
    assert ended.value.code == BROKEN
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "file = pathlib.Path(__file__).with_name(sys.argv[-1])\n"
        "count = int(file.read_text()) + 1 if file.exists() else 1\n"
        "file.write_text(str(count))\n"
        f"sys.exit({BROKEN} if count == 1 and sys.argv[-1] == '1' else 0)\n"
    )
    assert share([sys.executable, str(script)], 2) == 0
    assert [(tmp_path / name).read_text() for name in "01"] == ["1", "2"]


def test_a_rehearsal_never_becomes_a_result(stores, capsys):
    with pytest.raises(SystemExit):
        main(["proteins-evolution", "--stores", str(stores), "--rehearse"])
    assert "choose another --out" in capsys.readouterr().err


def test_little_is_needed_where_there_is_a_gpu():
    # A module that is None counts as not installed.
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('tyro', 'optuna', 'numba', 'sklearn', 'h5py', 'pandas', "
        "'matplotlib', 'pyarrow', 'accelerate', 'jinja2', 'tensorboard'))); import experiments.run, experiments.extract"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
