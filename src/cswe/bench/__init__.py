"""Time and memory of every way to compute the relaxed SWGG, against the definition, on this machine.

``python -m cswe.bench`` and ``cswe bench`` run it. Every figure is a ratio to ``dense`` in the same run; for LapSum,
which has no such way, to plain torch.
"""

import datetime
import platform
import shlex
import sys
from collections.abc import Iterator
from json import loads
from pathlib import Path
from typing import Any

import torch

from cswe.bench import cells
from cswe.bench.cells import Setting
from cswe.bench.meter import available_bytes, measure
from cswe.bench.tables import check_plot_place, lacking
from cswe.bench.tables import markdown as as_markdown
from cswe.bench.tables import plot as draw
from cswe.training.checkpoint import write_json
from cswe.training.provenance import commit, versions


def bench(
    quick: bool = False,
    device: str | None = None,
    json: Path | None = None,
    plot: Path | None = None,
    markdown: Path | None = None,
) -> None:
    """Measure every way to compute the relaxed SWGG on this machine, and print tables.

    Parameters
    ----------
    quick
        Small sizes, short runs: to see that it works.
    device
        ``cpu`` or ``cuda``; the GPU if there is one.
    json
        Write everything that was measured here, after every setting: what is broken off keeps what it has.
    plot
        Draw the growth with N here: a .png, .svg or .pdf file.
    markdown
        Measure nothing: print the tables of this JSON file, and draw its growth if ``plot`` is given.
    """
    if plot is not None:  # before the first figure: a place that cannot be drawn to should not cost any
        check_plot_place(plot)
    report: dict[str, Any] = {}
    if markdown is not None:
        _refuse_to_measure(quick, device, json)
        report = _read(markdown)
        if plot is not None and not report["growth"]:
            raise ValueError(f"plot: {markdown} has no growth with N to draw, its run was broken off; leave --plot out")
    else:
        for report in run(quick, _checked(device), _command(quick, device, json, plot)):
            if json is not None:
                _write(json, report)
    print(as_markdown(report), end="")  # before drawing: whatever happens there, the figures have been seen
    if plot is not None:
        _draw(plot, report)


def _refuse_to_measure(quick: bool, device: str | None, json: Path | None) -> None:
    given = {"--quick": quick, "--device": device is not None, "--json": json is not None}
    if any(given.values()):
        names = " and ".join(name for name, is_given in given.items() if is_given)
        raise ValueError(
            f"markdown: it prints the tables of a file and measures nothing; leave {names} out, or leave --markdown "
            "out to measure"
        )


def _command(quick: bool, device: str | None, json: Path | None, plot: Path | None) -> str:
    """Say how to measure this again; not from ``sys.argv``, which may be that of ``cswe bench`` or of any script."""
    words = ["python", "-m", "cswe.bench", *(["--quick"] if quick else [])]
    for name, value in (("--device", device), ("--json", json), ("--plot", plot)):
        if value is not None:
            words += [name, str(value)]
    return shlex.join(words)


def _checked(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda but got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but there is no CUDA device; leave it out to measure the CPU")
    return device


def _read(path: Path) -> dict[str, Any]:
    try:
        report = loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"markdown: there is no file {path}; --json FILE writes one") from None
    except ValueError:
        raise ValueError(f"markdown: {path} is not JSON; give it what --json has written") from None
    except OSError as error:
        raise ValueError(
            f"markdown: {path} cannot be read ({error.strerror}); give it what --json has written"
        ) from None
    if missing := lacking(report):
        raise ValueError(f"markdown: {path} has no {missing}; give it what --json has written")
    return dict(report)


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        write_json(path, report)
    except OSError as error:
        raise ValueError(f"json: {path} cannot be written ({error.strerror}); choose another place") from None


def _draw(path: Path, report: dict[str, Any]) -> None:
    try:
        draw(report, path)
    except OSError as error:
        raise ValueError(f"plot: {path} cannot be written ({error.strerror}); choose another place") from None


def run(quick: bool, device: str, command: str) -> Iterator[dict[str, Any]]:
    """Measure, saying on the way what is being measured; yield the report so far, as plain data, again and again."""
    seconds = 0.2 if quick else 1.0 if device == "cuda" else 2.0
    report: dict[str, Any] = {
        "device": _device_name(device),
        "date": datetime.date.today().isoformat(),
        "versions": versions("POT", "fswlib"),
        "commit": commit(),
        "command": command,
    }
    report |= {name: [] for name in ("settings", "lapsum", "growth", "rivals")}
    yield report  # before the first figure: a place that cannot be written to should not cost any
    for name, settings, measured in (
        ("settings", cells.settings, _by_every_way),
        ("lapsum", cells.lapsum_settings, _lapsum),
        ("growth", cells.growth, _by_every_way),
    ):
        for setting in settings(device, quick):
            report[name].append(measured(setting, device, seconds))
            yield report
    for operation, rival, setting in cells.rivals(device, quick):
        _say(f"{operation}, {setting.label}: {rival}")
        ours, theirs = (measure(operation, who, setting, device, seconds) for who in ("cswe", rival))
        report["rivals"].append(
            {"operation": operation, "rival": rival, "label": setting.label, "setting": setting.as_dict()}
            | {"ours": ours, "theirs": theirs}
        )
        yield report


def _by_every_way(setting: Setting, device: str, seconds: float) -> dict[str, Any]:
    results = {}
    for way in cells.ways(device):
        _say(f"relaxed, {setting.label}: {way}")
        needed = setting.dense_bytes()
        if way == "dense" and needed > 0.8 * available_bytes(device):
            results[way] = {"skipped": f"would need about {needed / 2**30:.0f} GiB"}
        else:
            results[way] = measure("relaxed", way, setting, device, seconds)
    return {"label": setting.label, "setting": setting.as_dict(), "ways": results}


def _lapsum(setting: Setting, device: str, seconds: float) -> dict[str, Any]:
    results = {}
    for way in cells.ways(device):
        if way != "dense":
            _say(f"LapSum, {setting.label}: {way}")
            results[way] = measure("lapsum", way, setting, device, seconds)
    return {"label": setting.label, "setting": setting.as_dict(), "ways": results}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s'[: threads > 1]}"
