"""What was measured, as tables and as a plot. Everything is made from the JSON, so that nothing is copied by hand."""

from math import log
from pathlib import Path
from statistics import linear_regression
from typing import Any

from cswe._extras import require

Report = dict[str, Any]
Kinds = dict[str, type | tuple[type, ...]]

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
NUMBER = (int, float)
UNKNOWN = type(None)
# What the tables and the plot use of a report, name by name, and its kind.
REPORT: Kinds = {"settings": list, "growth": list, "rivals": list, "device": str, "commit": (str, UNKNOWN)}
REPORT |= {"date": str, "versions": dict, "command": str}
CELLS: dict[str, Kinds] = {
    "settings": {"label": str, "ways": dict},
    "lapsum": {"label": str, "ways": dict},
    "growth": {"setting": dict, "ways": dict},
    "rivals": {"operation": str, "rival": str, "label": str, "ours": dict, "theirs": dict},
}
SIZES: Kinds = {"batch": int, "tokens": int, "dim": int, "slices": int}
RESULT: Kinds = {"ms": NUMBER, "peak_mib": (*NUMBER, UNKNOWN), "check": NUMBER}

TIME = {"ms": "time"}
OPERATIONS = {"hard": "hard SWGG", "moments": "embedding, L × 4 numbers"}
RIVALS = {"pot": "POT, `emd_1d` in a loop", "fswlib": "fswlib, `FSWEmbedding`"}
CAPTURED = (
    "*Captured*: the same, replayed from a CUDA graph, so that nothing waits for Python; both sides of a ratio are."
)


def markdown(report: Report) -> str:
    """Write a report as Markdown."""
    times = _times(report["settings"])
    parts = [
        f"**{report['device']}** · commit {report['commit'] or 'unknown'} · {report['date']} · "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        f"`{report['command']}`",
        "Relaxed SWGG, forward and backward to slices and reference: the best of several runs, and the peak of memory "
        "beyond the inputs. In brackets: how many times better than `dense` in the same run.",
        *([CAPTURED] if "captured_ms" in times else []),
        _table(
            ["B, N, d, L, τ", "way", *times.values(), "peak memory", "differs by"],
            [row for cell in report["settings"] for row in _rows(cell, "dense", times)],
        ),
        *_lapsum(report),
    ]
    if report["growth"]:  # a run that was broken off may have none
        fixed = ", ".join(str(report["growth"][0]["setting"][name]) for name in ("batch", "slices", "dim"))
        parts += [
            f"Growth with N, all else fixed (B, L, d = {fixed}); "
            "the slope is that of the least-squares line in log–log.",
            _growth_table(report["growth"]),
        ]
    if report["rivals"]:
        parts += [
            "Beside other libraries, forward only, same number of slices:",
            _table(
                ["operation", "B, N, d, L", "time", "rival", "its time", "ratio"], [_rival(c) for c in report["rivals"]]
            ),
        ]
    return "\n\n".join(parts) + "\n"


def lacking(report: Any) -> str:
    """Say what a report lacks to be written as Markdown and drawn; nothing, if it lacks nothing."""
    if missing := _missing(report, REPORT):
        return missing
    for part, kinds in CELLS.items():
        cells = report.get(part, [])  # LapSum may be missing: reports from before there was a compiled way
        if not isinstance(cells, list):
            return part
        for index, cell in enumerate(cells):
            where = f"{part}[{index}]"
            if missing := _missing(cell, kinds):
                return f"{missing} in {where}"
            if part == "growth" and (missing := _missing(cell["setting"], SIZES)):
                return f"{missing} in {where}.setting"
            results = cell["ways"] if "ways" in kinds else {side: cell[side] for side in ("ours", "theirs")}
            for name, result in results.items():
                is_skipped = isinstance(result, dict) and isinstance(result.get("skipped"), str)
                if not is_skipped and (missing := _missing(result, RESULT)):
                    return f"{missing} in {where}, {name}"
    return ""


def _missing(content: Any, kinds: Kinds) -> str:
    """List the names that are not there, or are not of their kind."""
    found = content if isinstance(content, dict) else {}
    return ", ".join(name for name, kind in kinds.items() if name not in found or not isinstance(found[name], kind))


def check_plot_place(path: Path) -> None:
    """Raise if a plot could not be written here."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ValueError(f"plot: expected a file that ends in {', '.join(PLOT_SUFFIXES)} but got {path}")
    if path.is_dir():
        raise ValueError(f"plot: {path} is a folder; give it the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"plot: there is no folder {path.parent} to write {path.name} to; make it, or choose another")
    require("matplotlib", extra="report")


def plot(report: Report, path: Path) -> None:
    """Draw time and memory against N."""
    pyplot = require("matplotlib.pyplot", extra="report")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for way in _ways(report["growth"]):
        for axes, key in ((left, "ms"), (right, "peak_mib")):
            found = [
                (cell["setting"]["tokens"], cell["ways"][way][key])
                for cell in report["growth"]
                if cell["ways"].get(way, {}).get(key)
            ]
            if found:
                axes.plot(*zip(*found, strict=True), marker="o", label=way)
    for axes, title in ((left, "time, ms"), (right, "peak memory, MiB")):
        axes.set(xscale="log", yscale="log", xlabel="tokens per set", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"Relaxed SWGG, forward and backward · {report['device']}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def slope(growth: list[Report], way: str) -> float | None:
    """Fit time = c N^slope."""
    found = [
        (log(cell["setting"]["tokens"]), log(cell["ways"][way]["ms"]))
        for cell in growth
        if "ms" in cell["ways"].get(way, {})
    ]
    if len(found) < 2:
        return None
    fitted: float = linear_regression(*zip(*found, strict=True)).slope
    return fitted


def _ways(cells: list[Report]) -> list[str]:
    return list(dict.fromkeys(way for cell in cells for way in cell["ways"]))


def _lapsum(report: Report) -> list[str]:
    if not report.get("lapsum"):  # on a GPU, and in reports from before there was a compiled way
        return []
    return [
        "The same under LapSum. In brackets: how many times better than plain torch, `scan`, in the same run.",
        _table(
            ["B, N, d, L, α", "way", *TIME.values(), "peak memory", "differs by"],
            [row for cell in report["lapsum"] for row in _rows(cell, "scan", TIME)],
        ),
    ]


def _times(cells: list[Report]) -> dict[str, str]:
    """Say which times there are, and what they are called."""
    captured = any("captured_ms" in result for cell in cells for result in cell["ways"].values())
    return TIME | ({"captured_ms": "captured"} if captured else {})


def _rows(cell: Report, yardstick: str, times: dict[str, str]) -> list[list[str]]:
    basis = cell["ways"].get(yardstick, {})
    rows: list[list[str]] = []
    for way, result in cell["ways"].items():
        label = cell["label"] if not rows else ""
        if "skipped" in result:
            rows.append([label, way, result["skipped"], *[""] * (len(times) + 1)])
            continue
        ratio_peak = _ratio(basis.get("peak_mib"), result["peak_mib"]) if way != yardstick else ""
        differs = ""
        if way != yardstick and basis.get("check"):
            differs = f"{abs(result['check'] / basis['check'] - 1):.0e}"
        shown = [
            "–" if key not in result else _ms(result[key]) + (_ratio(basis.get(key), result[key]) * (way != yardstick))
            for key in times
        ]
        rows.append([label, way, *shown, _mib(result["peak_mib"]) + ratio_peak, differs])
    return rows


def _growth_table(growth: list[Report]) -> str:
    ways = _ways(growth)
    rows = []
    for cell in growth:
        row = [str(cell["setting"]["tokens"])]
        for way in ways:
            result = cell["ways"].get(way, {"skipped": ""})
            row.append("–" if "skipped" in result else f"{_ms(result['ms'])}, {_mib(result['peak_mib'])}")
        rows.append(row)
    fitted = [slope(growth, way) for way in ways]
    rows.append(["slope", *("" if value is None else f"{value:.2f}" for value in fitted)])
    return _table(["N", *ways], rows)


def _rival(cell: Report) -> list[str]:
    ours, theirs, sizes = cell["ours"], cell["theirs"], cell["label"].rsplit(", ", 1)[0]
    if "skipped" in ours or "skipped" in theirs:
        return [cell["operation"], sizes, "", cell["rival"], ours.get("skipped") or theirs.get("skipped"), ""]
    return [
        OPERATIONS.get(cell["operation"], cell["operation"]),
        sizes,
        _ms(ours["ms"]),
        RIVALS.get(cell["rival"], cell["rival"]),
        _ms(theirs["ms"]),
        _times_better(theirs["ms"] / ours["ms"], decimals_above_ten=0),
    ]


def _ratio(yardstick: float | None, value: float | None) -> str:
    return f" ({_times_better(yardstick / value)})" if yardstick and value and value > 0 else ""


def _times_better(ratio: float, decimals_above_ten: int = 1) -> str:
    if ratio < 0.095:  # what one decimal would show as nothing
        return f"{ratio:.1g}×"
    return f"{ratio:.{1 if ratio < 9.95 else decimals_above_ten}f}×"


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms" if value < 1e4 else f"{value / 1e3:.1f} s"


def _mib(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.1f} MiB" if value < 10 else f"{value:.0f} MiB" if value < 1024 else f"{value / 1024:.1f} GiB"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
