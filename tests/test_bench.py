"""The benchmark runs, and its tables say what the figures say. Nothing here depends on how fast anything is."""

import importlib
import json
import shlex
import subprocess
import sys
from unittest.mock import Mock

import pytest

from cswe import cli
from cswe._extras import MissingExtraError
from cswe.bench import bench, cells, measure, tables
from cswe.bench.cells import Setting
from cswe.bench.meter import measure_here

PACKAGE = importlib.import_module("cswe.bench")
MAIN = importlib.import_module("cswe.bench.__main__")
TINY = Setting(2, 12, 5, 3, tau=0.1)


@pytest.mark.parametrize("setting", [TINY, Setting(3, 12, 5, 2, dtype="float16"), Setting(3, 12, 5, 2, shortest=4)])
def test_all_ways_compute_the_same(setting):
    checks = [measure_here("relaxed", way, setting, "cpu", 0.0)["check"] for way in cells.ways("cpu")]
    assert checks == pytest.approx([checks[0]] * len(checks), rel=1e-4)


def test_both_ways_of_lapsum_compute_the_same():
    checks = [measure_here("lapsum", way, TINY, "cpu", 0.0)["check"] for way in ("scan", "cpu")]
    assert checks == pytest.approx([checks[0]] * 2, rel=1e-4)


def test_the_rival_computes_the_same():
    pytest.importorskip("ot")
    ours, theirs = (measure_here("hard", who, TINY, "cpu", 0.0) for who in ("cswe", "pot"))
    assert ours["check"] == pytest.approx(theirs["check"], rel=1e-4)


def test_the_other_embedding_has_as_many_numbers():
    pytest.importorskip("fswlib")
    ours, theirs = (cells.moments(TINY, who, "cpu")() for who in ("cswe", "fswlib"))
    assert ours.shape == theirs.shape == (2, 3, cells.MOMENTS)


def test_a_cell_in_its_own_process():
    result = measure("relaxed", "scan", TINY, "cpu", 0.0)
    assert result["ms"] > 0
    assert result["repeats"] >= 1
    assert set(result) == {"ms", "median_ms", "repeats", "peak_mib", "check"}
    assert "skipped" in measure("relaxed", "no such way", TINY, "cpu", 0.0)


PEAK = """
import builtins, json, sys
from cswe.bench import meter
if sys.argv[1] == "without reset":
    real = builtins.open
    def refuse(path, *rest, **named):
        if path == "/proc/self/clear_refs":
            raise PermissionError(path)
        return real(path, *rest, **named)
    builtins.open = refuse
def peak_of(size):
    reader = meter._peak_reader()
    room = bytearray(size << 20)
    room[:: 1 << 12] = b"x" * len(room[:: 1 << 12])
    del room
    return reader()
print(json.dumps([peak_of(512), peak_of(64)]))
"""


def peaks(how):
    # In a process of its own: in this one, what earlier tests needed lies above any peak to come.
    child = subprocess.run([sys.executable, "-c", PEAK, how], capture_output=True, text=True, check=True)
    return json.loads(child.stdout)


def test_peak_memory_is_that_of_the_run():
    large, small = peaks("as it is here")
    assert 500 < large < 540
    assert small is None or 60 < small < 80


def test_a_peak_below_an_earlier_one_is_unknown_where_it_cannot_be_forgotten():
    large, small = peaks("without reset")
    assert 500 < large < 540
    assert small is None


def report():
    def cell(n, **ways):
        setting = Setting(2, n, 64, 4)
        return {"label": setting.label, "setting": setting.as_dict(), "ways": ways}

    def result(ms, mib):
        return {"ms": ms, "median_ms": ms, "repeats": 3, "peak_mib": mib, "check": 1.0}

    return {
        "device": "a machine, 2 threads",
        "date": "2026-01-01",
        "versions": {"torch": "2"},
        "commit": "abc",
        "command": "python -m cswe.bench",
        "settings": [cell(196, dense=result(800.0, 640.0), cpu=result(20.0, 8.0))],
        "lapsum": [cell(196, scan=result(900.0, 640.0), cpu=result(30.0, 8.0))],
        "growth": [
            cell(256, dense=result(4.0, 10.0), cpu=result(1.0, 1.0)),
            cell(512, dense=result(16.0, 40.0), cpu=result(2.0, 2.0)),
            cell(1024, dense={"skipped": "would need about 99 GiB"}, cpu=result(4.0, 4.0)),
        ],
        "rivals": [
            {"operation": "hard", "rival": "pot", "label": "2, 9, 4, 3, 0.1", "ours": result(1.0, 1.0)}
            | {"theirs": result(50.0, 1.0)}
        ],
    }


def test_tables():
    text = tables.markdown(report())
    assert "| 2, 196, 64, 4, 0.01 | dense | 800 ms | 640 MiB |" in text
    assert "cpu | 20 ms (40.0×) | 8.0 MiB (80.0×) | 0e+00 |" in text
    assert "cpu | 30 ms (30.0×) | 8.0 MiB (80.0×) | 0e+00 |" in text
    assert "| slope | 2.00 | 1.00 |" in text
    assert "| 1024 | – | 4.00 ms, 4.0 MiB |" in text
    assert "| 50 ms | 50× |" in text


@pytest.mark.parametrize(
    ("theirs", "shown"), [(1.0, "0.3×"), (1.8, "0.6×"), (0.03, "0.01×"), (28.5, "9.5×"), (29.9, "10×"), (150.0, "50×")]
)
def test_a_rival_that_is_faster_is_not_shown_as_no_time_at_all(theirs, shown):
    beside = report()
    beside["rivals"][0]["ours"]["ms"], beside["rivals"][0]["theirs"]["ms"] = 3.0, theirs
    assert f"| {shown} |" in tables.markdown(beside)


def test_a_way_that_is_much_slower_is_not_shown_as_no_times_better():
    slower = report()
    slower["settings"][0]["ways"]["cpu"]["ms"] = 80000.0
    assert "cpu | 80.0 s (0.01×) |" in tables.markdown(slower)


def test_a_rival_that_has_no_long_name_is_shown_by_its_own():
    beside = report()
    beside["rivals"][0] |= {"operation": "soft", "rival": "other"}
    assert "| soft | 2, 9, 4, 3 | 1.00 ms | other | 50 ms | 50× |" in tables.markdown(beside)


def test_times_from_a_graph_have_a_column_where_there_are_some():
    with_graphs = report()
    ways = with_graphs["settings"][0]["ways"]
    ways["dense"]["captured_ms"], ways["cpu"]["captured_ms"] = 600.0, 10.0
    text = tables.markdown(with_graphs)
    assert "| way | time | captured | peak memory |" in text
    assert "cpu | 20 ms (40.0×) | 10 ms (60.0×) | 8.0 MiB (80.0×) | 0e+00 |" in text
    assert "captured" not in tables.markdown(report())


def test_tables_of_older_reports():
    older = report()
    del older["lapsum"]
    assert "LapSum" not in tables.markdown(older)


def test_printing_a_report_measures_nothing(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    bench(markdown=path)
    assert capsys.readouterr().out == tables.markdown(report())


def test_printing_a_report_draws_it_too(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    bench(markdown=path, plot=tmp_path / "growth.svg")
    assert capsys.readouterr().out == tables.markdown(report())
    assert "</svg>" in (tmp_path / "growth.svg").read_text()


def test_a_report_without_growth_is_not_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report() | {"growth": []}))
    with pytest.raises(ValueError, match=r"plot: .*report.json has no growth with N to draw, .*; leave --plot out"):
        bench(markdown=path, plot=tmp_path / "growth.png")
    assert not (tmp_path / "growth.png").exists()


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ({"json": "b.json"}, "--json"),
        ({"quick": True, "device": "cpu"}, "--quick and --device"),
        ({"quick": True, "json": "b.json"}, "--quick and --json"),
    ],
)
def test_what_measures_is_refused_beside_what_prints(tmp_path, capsys, beside, named):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    with pytest.raises(ValueError, match=f"markdown: .* measures nothing; leave {named} out, or leave --markdown out"):
        bench(markdown=path, **beside)
    assert capsys.readouterr().out == ""


def measures_at_once(monkeypatch):
    result = {"ms": 1.0, "median_ms": 1.0, "repeats": 1, "peak_mib": 1.0, "check": 1.0}
    monkeypatch.setattr(PACKAGE, "measure", lambda *arguments: result)


def instead_of_bench(monkeypatch, error=None):
    stand_in = Mock(side_effect=error, __doc__=bench.__doc__)
    monkeypatch.setattr(MAIN, "bench", stand_in)
    return stand_in


@pytest.mark.parametrize("caller", ["cswe bench", "python -m cswe.bench", "a script"])
def test_the_command_of_a_report_can_be_run_however_it_was_measured(tmp_path, monkeypatch, caller):
    measures_at_once(monkeypatch)
    path = tmp_path / "a report.json"
    given = ["--quick", "--device", "cpu", "--json", str(path)]
    if caller == "cswe bench":
        monkeypatch.setattr(sys, "argv", ["cswe", "bench", *given])
        assert cli.main() == 0
    elif caller == "python -m cswe.bench":
        monkeypatch.setattr(sys, "argv", ["__main__.py", *given])
        MAIN.main()
    else:
        monkeypatch.setattr(sys, "argv", ["script.py", "--of-its-own"])
        bench(quick=True, device="cpu", json=path)
    command = shlex.split(json.loads(path.read_text())["command"])
    assert command == ["python", "-m", "cswe.bench", *given]
    again = instead_of_bench(monkeypatch)
    monkeypatch.setattr(sys, "argv", command[2:])
    MAIN.main()
    again.assert_called_once_with(True, "cpu", path, None, None)


def test_tables_are_printed_before_anything_is_drawn(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    measures_at_once(monkeypatch)

    monkeypatch.setattr(PACKAGE, "draw", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ValueError, match=r"plot: .*growth.png cannot be written \(Permission denied\); choose another"):
        bench(quick=True, device="cpu", plot=tmp_path / "growth.png")
    assert "Growth with N" in capsys.readouterr().out


def test_a_run_that_is_broken_off_keeps_what_it_has(tmp_path, monkeypatch, capsys):
    module = importlib.import_module("cswe.bench")
    measured = []

    def measure(operation, who, setting, device, seconds):
        measured.append(setting)
        if len(measured) == 5:
            raise KeyboardInterrupt
        return {"ms": 1.0, "median_ms": 1.0, "repeats": 1, "peak_mib": 1.0, "check": 1.0}

    monkeypatch.setattr(module, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        bench(quick=True, device="cpu", json=tmp_path / "report.json")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    left = json.loads((tmp_path / "report.json").read_text())
    assert [cell["setting"]["batch"] for cell in left["settings"]] == [8]
    bench(markdown=tmp_path / "report.json")
    assert "Growth" not in capsys.readouterr().out


def test_files_that_cannot_be_used_are_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("cswe.bench"), "measure", lambda *arguments: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"json: .*report.json cannot be written"):
        bench(quick=True, device="cpu", json=tmp_path / "nowhere" / "report.json")
    with pytest.raises(ValueError, match=r"markdown: there is no file .*; --json FILE writes one"):
        bench(markdown=tmp_path / "report.json")
    for text, said in (("{", "is not JSON"), ('{"growth": []}', "has no settings, rivals"), ("[]", "has no settings")):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(ValueError, match=f"report.json {said}"):
            bench(markdown=tmp_path / "report.json")
    with pytest.raises(ValueError, match=r"markdown: .* cannot be read \(Is a directory\); give it what --json"):
        bench(markdown=tmp_path)


def test_a_place_that_cannot_be_drawn_to_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(PACKAGE, "measure", lambda *arguments: pytest.fail("measured"))
    (tmp_path / "folder.png").mkdir()
    for name, said in (
        ("nowhere/growth.png", r"there is no folder .*nowhere to write growth.png to; make it"),
        ("folder.png", r".*folder.png is a folder; give it the name of a file"),
        ("growth.xyz", r"expected a file that ends in .png, .svg, .pdf but got .*growth.xyz"),
        ("growth", r"expected a file that ends in .png, .svg, .pdf but got .*growth"),
    ):
        with pytest.raises(ValueError, match=f"plot: {said}"):
            bench(quick=True, device="cpu", plot=tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"'matplotlib', which is not installed: pip install 'cswe\[report\]'"):
        bench(quick=True, device="cpu", plot=tmp_path / "growth.PNG")


@pytest.mark.parametrize(
    ("way_there", "said"),
    [
        (["device"], "device"),
        (["commit"], "commit"),
        (["settings", 0, "label"], r"label in settings\[0\]"),
        (["settings", 0, "ways", "cpu", "check"], r"check in settings\[0\], cpu"),
        (["lapsum", 0, "ways"], r"ways in lapsum\[0\]"),
        (["growth", 1, "setting", "tokens"], r"tokens in growth\[1\].setting"),
        (["growth", 2, "ways", "dense", "skipped"], r"ms, peak_mib, check in growth\[2\], dense"),
        (["rivals", 0, "theirs", "ms"], r"ms in rivals\[0\], theirs"),
    ],
)
def test_what_a_report_lacks_is_named(tmp_path, way_there, said):
    path, half = tmp_path / "half.json", report()
    *outer, last = way_there
    part = half
    for name in outer:
        part = part[name]
    del part[last]
    path.write_text(json.dumps(half))
    with pytest.raises(ValueError, match=f"markdown: .*half.json has no {said}; give it what --json has written"):
        bench(markdown=path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"growth": {"256": 4.07}}, "growth"),
        ({"versions": None}, "versions"),
        ({"lapsum": 3}, "lapsum"),
        ({"settings": [1]}, "label, ways in settings[0]"),
    ],
)
def test_what_is_not_of_its_kind_is_lacking(changed, said):
    assert tables.lacking(report()) == tables.lacking(report() | {"commit": None}) == ""
    assert tables.lacking(report() | changed) == said


def test_errors_are_told_in_one_line(tmp_path, monkeypatch, capsys):
    def ends_with(error):
        instead_of_bench(monkeypatch, error)
        with pytest.raises(SystemExit) as stop:
            MAIN.main()
        return stop.value.code, capsys.readouterr().err.splitlines()[-1]

    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    assert ends_with(ValueError("device: no")) == (2, "python -m cswe.bench: error: device: no")
    assert ends_with(OSError(28, "No space left")) == (1, "python -m cswe.bench: [Errno 28] No space left")
    assert ends_with(MissingExtraError("this needs it")) == (1, "python -m cswe.bench: this needs it")


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch):
    instead_of_bench(monkeypatch, BrokenPipeError(32, "Broken pipe"))
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # to be given back
    MAIN.main()


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    tables.plot(report(), tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 1000


def test_dense_is_left_out_where_it_does_not_fit(monkeypatch):
    module = importlib.import_module("cswe.bench")
    monkeypatch.setattr(module, "available_bytes", lambda device: 1)
    monkeypatch.setattr(module, "measure", lambda *arguments: {})
    results = module._by_every_way(Setting(32, 196, 192, 16), "cpu", 0.0)["ways"]
    assert results["dense"]["skipped"].startswith("would need about")
    assert results["scan"] == {}


def test_a_device_that_is_not_there(monkeypatch):
    with pytest.raises(ValueError, match="device: expected cpu or cuda but got 'xyz'"):
        bench(device="xyz")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no CUDA device; leave it out"):
        bench(device="cuda")


def test_it_needs_no_command_line_library():
    code = "import sys; sys.modules['tyro'] = None; import cswe.bench.__main__"
    subprocess.run([sys.executable, "-c", code], check=True)
