"""The harness of the experiments: every cell once, by priority, whatever is known, breaks down or runs out of time."""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cswe.tokens import Item, TokenStore
from cswe.tokens.backbones.base import Backbone, Encoded
from cswe.training.cells import Plan
from cswe.training.fit import fit
from cswe.training.locking import Lock
from cswe.training.provenance import commit
from experiments import worker as worker_module
from experiments.expect import Sizes, expected_seconds
from experiments.extract import NormedToo
from experiments.extract import main as extract
from experiments.pools import with_choices
from experiments.records import RESULTS, add_extraction, add_result, read_extractions, read_study
from experiments.run import main, share
from experiments.studies import LITERAL, STUDIES, Entry, Study
from experiments.tuning import IMAGES, chosen_by
from experiments.worker import BROKEN, Worker

ROOT = Path(__file__).resolve().parents[2]
TINY = ("epochs=1", "batch_size=16", "points=6")


def study(name="small", pools=("mean", "swe"), wave=0, store="sets", **options):
    plan = Plan(pools, (2,), 2, layers=(6,), choices=TINY)
    return Study(name, "proteins", lambda chosen: [Entry(plan, wave, store)], **options)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Token sets of three classes, as the store ``proteins`` has them but small."""
    folder = tmp_path_factory.mktemp("stores")
    generator = torch.Generator().manual_seed(0)

    def items():
        for number in range(72):
            tokens = torch.randn(5 + number % 4, 4, generator=generator) + number % 3
            split = ("train", "train", "validation", "test")[number // 3 % 4]
            yield Item({6: tokens}, number % 3, f"{number}", split, cls={6: tokens[0]})

    for name in ("sets", "proteins"):
        TokenStore.create(folder / name, items(), classes=["a", "b", "c"])
    return folder


@pytest.fixture
def work(stores, tmp_path):
    """A worker of its own, told what to do."""

    def make(*studies, out="out", **options):
        told = []
        made = Worker(
            list(studies), stores, tmp_path / out, options.pop("known", []), options.pop("work", tmp_path / "work"),
            torch.device("cpu"), tell=told.append, **options,
        )  # fmt: skip
        return made, told

    return make


@pytest.fixture
def made_at(monkeypatch):
    """Let results from now on be of a commit."""

    def set_commit(name):
        monkeypatch.setenv("CSWE_COMMIT", name)
        commit.cache_clear()

    yield set_commit
    commit.cache_clear()


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
    assert work(study(), remake=("0ld0ld0", "0ther0th"))[0].run() == 2
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


def test_no_cell_is_begun_that_would_not_end_in_time(work):
    worker, told = work(study(), until=time.monotonic() + 1)
    assert worker.run() == 0
    assert told == ["worker 0: no time left for another cell"]


def test_a_store_that_is_not_there_is_waited_for_until_time_is_up(work):
    worker, told = work(study(store="missing"), until=time.monotonic() + 0.1)
    started = time.monotonic()
    assert worker.run() == 0
    assert time.monotonic() - started < 5
    assert all("waiting for" in line and "missing" in line for line in told)


def test_a_store_that_nobody_makes_is_not_waited_for(work, stores, monkeypatch):
    monkeypatch.setattr(worker_module, "_GRACE", 0.0)
    worker, told = work(study("there", pools=("mean",)), study("other", store="missing"))
    assert worker.run() == 2
    assert worker.failed == ["missing"]
    assert told[-1].endswith("and nobody makes it: python -m experiments.extract missing")
    assert not (stores / "missing.lock").exists()


def test_a_store_that_is_being_made_is_waited_for(work, stores, monkeypatch):
    monkeypatch.setattr(worker_module, "_GRACE", 0.0)
    lock = Lock(stores / "missing.lock")
    assert lock.take()
    looks = iter(range(3))

    def look(_):
        if next(looks) == 1:
            lock.release(remove=True)  # that extraction was killed

    monkeypatch.setattr(worker_module.time, "sleep", look)
    worker, told = work(study(store="missing"))
    assert worker.run() == 0
    assert [("waiting for" in line, "nobody makes it" in line) for line in told] == [(True, False), (False, True)]
    assert next(looks) == 2


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


def test_final_runs_of_another_choice_are_made_again(work, tmp_path):
    def final(epochs):
        plan = Plan(("mean",), (2,), 1, layers=(6,), choices=(f"epochs={epochs}", *TINY[1:]))
        return Study("final", "proteins", lambda chosen: [Entry(plan, 0, "sets")], replace(IMAGES, sought=()))

    assert [work(final(epochs))[0].run() for epochs in (1, 1, 2, 2)] == [1, 0, 1, 0]
    assert [result.cell.recipe.optimization.epochs for result in read_study(tmp_path / "out", "final").values()] == [2]
    assert work(final(1), again=True)[0].run() == 0  # what is known is not of this recipe


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


def test_an_extraction_is_noted_once(tmp_path, capsys):
    numpy = pytest.importorskip("numpy")
    rng = numpy.random.default_rng(0)
    points = rng.normal(size=(40, 8, 3)).astype("float32")
    numpy.savez(tmp_path / "modelnet-part.npz", points=points, labels=numpy.arange(40) % 2)
    words = ["raw-1", "--assets", str(tmp_path), "--stores", str(tmp_path / "stores"), "--out", str(tmp_path / "out")]
    claimed = Lock(tmp_path / "stores" / "raw-1.lock")
    assert claimed.take()
    extract([*words, "--device", "cpu"])
    assert "another process is making it" in capsys.readouterr().out
    claimed.release()
    extract([*words, "--device", "cpu"])
    extract([*words, "--device", "cpu"])
    assert "is there already" in capsys.readouterr().out
    assert not list((tmp_path / "stores").glob("raw*.lock"))
    (entry,) = read_extractions(tmp_path / "out")
    assert (entry["store"], entry["items"], entry["tokens"]) == ("raw-1", 40, 320)
    store = TokenStore(tmp_path / "stores" / "raw-1")
    assert [len(store.split(name)) for name in ("train", "validation", "test")] == [20, 8, 12]
    add_extraction(tmp_path / "out", {**entry, "seconds": 1.0}, tmp_path / "lock")
    assert [line["seconds"] for line in read_extractions(tmp_path / "out")] == [1.0]


def test_tokens_of_points_are_there_normalised_too():
    class Long(Backbone):
        kind, layers, preparer, device = "points", {5: 4}, None, torch.device("cpu")

        def encode(self, units, dtype):
            pieces = [torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 100.0, 200.0, 300.0]])] * len(units)
            return Encoded({5: pieces}, [2] * len(units), torch.ones(len(units), dtype=torch.bool))

        def describe(self):
            return {"name": "long"}

    both = NormedToo(Long())
    encoded = both.encode([0, 1], "float32")
    assert dict(both.layers) == {5: 4, 6: 4}
    assert encoded.tokens[5][0].max() == 300
    for piece in encoded.tokens[6]:
        torch.testing.assert_close(piece.mean(1), torch.zeros(2), atol=1e-6, rtol=0)
        torch.testing.assert_close(piece[0], piece[1], atol=1e-4, rtol=0)
    assert set(both.describe()) == {"name", "layer 6"}


def test_little_is_needed_where_there_is_a_gpu():
    # A module that is None counts as not installed.
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('tyro', 'optuna', 'numba', 'sklearn', 'h5py', 'pandas', "
        "'matplotlib', 'pyarrow', 'accelerate', 'jinja2', 'tensorboard'))); import experiments.run, experiments.extract"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
