"""The benchmark runs, and its tables say what the figures say. Nothing here depends on how fast anything is."""

import importlib
import json
import subprocess
import sys

import pytest

from cswe.bench import bench, cells, measure, tables
from cswe.bench.cells import Setting
from cswe.bench.meter import measure_here

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
