"""Write ``docs/results.md`` from the results and a template: ``python -m experiments.tables``.

In the template ``{{table NAME}}`` and ``{{figure NAME}}`` stand for what their names say,
``{{score STUDY POOL LAYER L}}`` for a mean over seeds and ``{{gain STUDY POOL RIVAL LAYER L}}`` for a difference seed
by seed, with its standard error (L is left out for poolings that have no slices, or one number of them; poolings are
named as in `experiments.pools`). No number of ours is written by hand.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from cswe.training.table import grid
from experiments import image_tables, set_tables
from experiments.lookup import NOTHING, Results, gain_text, mean_text
from experiments.pools import POOLS
from experiments.records import RESULTS, read_extractions, read_study
from experiments.studies import STUDIES

TEMPLATE = Path(__file__).with_name("results_template.md")
PAGE = Path(__file__).parent.parent / "docs" / "results.md"
FIGURES = PAGE.parent / "figures"


def made_table(results: Results) -> str:
    """Say what the results were made with."""
    found = [
        result for study in STUDIES for result in read_study(results.folder, study).values() if result.error is None
    ]

    minutes = sum(result.facts["seconds"] for result in found) / 60

    def listed(values: list[str]) -> str:
        return ", ".join(sorted(set(values))) or NOTHING

    names = ("python", "torch", "triton", "numpy")
    versions = [
        f"{name} {result.facts['versions'][name]}"
        for result in found
        for name in names
        if name in result.facts["versions"]
    ]
    rows = [
        ["runs", str(len(found)) if found else NOTHING],
        ["device", listed([str(result.facts["machine"]["device"]) for result in found])],
        ["versions", listed(versions)],
        ["commit", listed([str(result.facts["commit"])[:10] for result in found])],
        ["processes on the device", listed([str(result.facts.get("processes", 1)) for result in found])],
        ["time of all runs, added up", f"{minutes:.0f} min" if found else NOTHING],
    ]
    rows += [
        [f"extraction, {entry['store']}", f"{entry['items']:,} items in {entry['seconds']:.0f} s"]
        for entry in read_extractions(results.folder)
    ]
    return grid(["", ""], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "images-table1": image_tables.table1,
    "images-epochs": image_tables.epochs_check,
    "images-slices": image_tables.slices_table,
    "images-map": image_tables.map_table,
    "images-temperature": image_tables.temperature_table,
    "images-tuning": image_tables.tuning_table,
    "images-tuned": image_tables.tuned_table,
    "images-tuned-differences": image_tables.tuned_differences,
    "images-nearest": image_tables.nearest_table,
    "images-few": image_tables.few_table,
    "images-clock": image_tables.clock_table,
    "proteins-table": set_tables.proteins_table,
    "proteins-literal": set_tables.proteins_literal,
    "proteins-tuned": set_tables.proteins_tuned,
    "points-table": set_tables.points_table,
    "points-normed": set_tables.normed_table,
    "points-raw": set_tables.raw_table,
    "made-with": made_table,
}


def render(template: str, results: Results) -> str:
    """Fill a template in."""

    def fill(match: re.Match[str]) -> str:
        kind, *words = match.group(1).split()
        if kind == "table":
            return TABLES[words[0]](results).rstrip()
        if kind == "figure":
            there = (FIGURES / f"{words[0]}.png").exists()
            return f"![{words[0]}](figures/{words[0]}.png)" if there else "(No figure yet.)"
        if kind == "score":
            study, key, layer, *slices = words
            return mean_text(results.row(study, POOLS[key].text, int(layer), _slices_of(key, slices)))
        if kind == "gain":
            study, key, rival, layer, *slices = words
            own, other = (
                results.row(study, POOLS[name].text, int(layer), _slices_of(name, slices)) for name in (key, rival)
            )
            return gain_text(own, other)
        raise ValueError(f"{TEMPLATE.name}: expected table, figure, score or gain but got {match.group(0)!r}")

    filled = re.sub(r"\{\{(.+?)\}\}", fill, template)
    return f"<!-- Made by `python -m experiments.tables` from experiments/{TEMPLATE.name}; change that. -->\n\n{filled}"


def _slices_of(key: str, words: list[str]) -> int | None:
    return int(words[0]) if words else POOLS[key].slices


def main(arguments: list[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tables", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    chosen = parser.parse_args(arguments)
    text = render(TEMPLATE.read_text(encoding="utf-8"), Results(chosen.results))
    chosen.page.parent.mkdir(parents=True, exist_ok=True)
    chosen.page.write_text(text, encoding="utf-8", newline="\n")
    print(f"{chosen.page}: written")


if __name__ == "__main__":
    main()
