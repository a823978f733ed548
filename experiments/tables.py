"""Write ``docs/results.md`` from the results and a template: ``python -m experiments.tables``.

And the short table in ``README.md``, between its marks.

In the template ``{{table NAME}}`` and ``{{figure NAME}}`` stand for what their names say, ``{{progress}}`` for what is
still to run, ``{{score STUDY POOL LAYER L}}`` for a mean over seeds and ``{{gain STUDY POOL RIVAL LAYER L}}`` for a
difference seed by seed, with its standard error: of test accuracy, balanced on points, or of METRIC, if the study is
named ``STUDY:METRIC``, and on another split, if it is named ``STUDY:METRIC@SPLIT``. ``gain-overlap`` corrects the error
for splits of points having shapes in common; ``{{swgg STUDY POOL LAYER L}}`` is SWGG after the last epoch.

L is left out for poolings that have no slices, or one number of them; a second L is the rival's, and so is a second
layer, as in ``6:5``. Poolings are named as in `experiments.pools`; ``:80`` after a name: its runs of 80 epochs, of 80
labels a class in `images-few`, or with that rate in `points-evolution`; ``STUDY/`` before it: its runs in another
study. What stands between ``{{if STUDY}}`` and ``{{end}}`` is left out while that study has no results;
``{{if STUDY:TEXT}}``: none with this in their name. No number of ours is written by hand.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cswe.training.table import Row, grid
from experiments import image_tables, set_tables
from experiments.headline import README, with_headline
from experiments.lookup import NOTHING, Results, gain_text, mean_text, swgg_text
from experiments.pools import POINT_FRACTIONS, POOLS, point_pools, with_choices
from experiments.records import RESULTS, read_extractions, read_study
from experiments.studies import STUDIES

TEMPLATE = Path(__file__).with_name("results_template.md")
PAGE = Path(__file__).parent.parent / "docs" / "results.md"
FIGURES = PAGE.parent / "figures"
TEST_BY_TRAIN = POINT_FRACTIONS[1] / (1 - sum(POINT_FRACTIONS))


def _range(values: list[float]) -> str:
    """Write the least and the largest of some numbers."""
    return " to ".join(f"{value:.3g}" for value in sorted({min(values), max(values)})) if values else NOTHING


def made_table(results: Results) -> str:
    """Say what the results were made with."""
    by_study = {
        name: [result for result in read_study(results.folder, name).values() if result.error is None]
        for name in STUDIES
    }
    found = [result for of_study in by_study.values() for result in of_study]

    minutes = sum(result.facts["seconds"] for result in found) / 60
    shares: dict[str, float] = {}  # a process has that part of the device for itself
    for name, of_study in by_study.items():
        family = STUDIES[name].family
        share = sum(result.facts["seconds"] / result.facts.get("processes", 1) for result in of_study) / 60
        shares[family] = shares.get(family, 0.0) + share

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
        ["processes on the device", _range([result.facts.get("processes", 1) for result in found])],
        ["time of all runs, added up", f"{minutes:.0f} min" if found else NOTHING],
        ["divided by the processes", ", ".join(f"{name} {share:.0f} min" for name, share in shares.items() if share)],
    ]
    made: dict[str, list[dict[str, Any]]] = {}
    for entry in read_extractions(results.folder):
        made.setdefault(re.sub(r"-\d+$", "", entry["store"]), []).append(entry)
    for name, splits in made.items():
        times = [entry["seconds"] for entry in splits]
        seconds = _range(times)
        count = "" if len(splits) == 1 else f", {len(splits)} splits"
        rows.append([f"extraction, {name}{count}", f"{splits[0]['items']:,} items in {seconds} s"])
    return grid(["", ""], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "images-table1": image_tables.table1,
    "images-epochs": image_tables.epochs_check,
    "images-slices": image_tables.slices_table,
    "images-map": image_tables.map_table,
    "images-matching": image_tables.matching_table,
    "images-temperature": image_tables.temperature_table,
    "images-soft": image_tables.soft_table,
    "images-tuning": image_tables.tuning_table,
    "images-tuned": image_tables.tuned_table,
    "images-tuned-differences": image_tables.tuned_differences,
    "images-nearest": image_tables.nearest_table,
    "images-nearest-differences": image_tables.nearest_differences,
    "images-shapes": image_tables.shapes_table,
    "images-beyond": image_tables.beyond_table,
    "images-longer": image_tables.longer_table,
    "images-few": image_tables.few_table,
    "images-clock": image_tables.clock_table,
    "proteins-table": set_tables.proteins_table,
    "proteins-tuning": set_tables.proteins_tuning,
    "proteins-tuned": set_tables.proteins_tuned,
    "points-table": set_tables.points_table,
    "points-normed": set_tables.normed_table,
    "points-raw": set_tables.raw_table,
    "points-longer": set_tables.longer_points_table,
    "made-with": made_table,
}


def progress(results: Results) -> str:
    """Say what is still to run."""
    none, some = [], []
    for study in STUDIES.values():
        every = {} if study.search is None else {sought.key: study.search.grid[0] for sought in study.search.sought}
        planned, known = len(study.tasks(every)), len(read_study(results.folder, study.name))
        if not known:
            none.append(f"`{study.name}`")
        elif known < planned:
            some.append(f"`{study.name}` ({known} of {planned})")
    parts = [f"not run yet: {', '.join(none)}"] if none else []
    parts += [f"run in part, cells: {', '.join(some)}"] if some else []
    return f"Still to do. {'; '.join(parts).capitalize()}." if parts else "All studies are complete."


def render(template: str, results: Results) -> str:
    """Fill a template in."""

    def part(match: re.Match[str]) -> str:
        study, _, text = match.group(1).partition(":")
        return match.group(2) if any(text in name for name in read_study(results.folder, study)) else ""

    def row(study: str, name: str, layer: str, slices: list[str]) -> Row | None:
        if "/" in name:
            study, _, name = name.partition("/")
        key, _, count = name.partition(":")
        pools = point_pools(int(layer)) if study.startswith("points") else POOLS
        named = pools[key]
        counted = {"images-few": "labels_per_class", "points-evolution": "lr"}.get(study, "epochs")
        text = with_choices(named.text, f"{counted}={count}") if count else named.text
        return results.row(study, text, int(layer), int(slices[0]) if slices else named.slices)

    def fill(match: re.Match[str]) -> str:
        kind, *words = match.group(1).split()
        if kind == "table":
            return TABLES[words[0]](results).rstrip()
        if kind == "progress":
            return progress(results)
        if kind == "figure":
            there = (FIGURES / f"{words[0]}.png").exists()
            return f"![{words[0]}](figures/{words[0]}.png)" if there else ""
        if kind in ("score", "gain", "gain-overlap"):
            study, _, asked = words.pop(0).partition(":")
            asked, _, split = asked.partition("@")
            metric = asked or ("balanced" if study.startswith("points") else "top1")
            if kind == "score":
                key, layer, *slices = words
                return mean_text(row(study, key, layer, slices), split or "test", metric)
            key, rival, layers, *slices = words
            layer, _, rivals_layer = layers.partition(":")
            other = row(study, rival, rivals_layer or layer, slices[1:] or slices)
            overlap = TEST_BY_TRAIN if kind == "gain-overlap" else 0.0
            return gain_text(row(study, key, layer, slices), other, split or "test", metric, overlap)
        if kind == "swgg":
            study, key, layer, *slices = words
            return swgg_text(row(study, key, layer, slices))
        raise ValueError(
            f"{TEMPLATE.name}: expected table, figure, progress, score, gain or swgg but got {match.group(0)!r}"
        )

    kept = re.sub(r"\{\{if (\S+?)\}\}\n(.*?)\{\{end\}\}\n", part, template, flags=re.DOTALL)
    filled = re.sub(r"\{\{(.+?)\}\}", fill, kept)
    filled = re.sub(r"\n{3,}", "\n\n", filled)
    return f"<!-- Made by `python -m experiments.tables` from experiments/{TEMPLATE.name}; change that. -->\n\n{filled}"


def main(arguments: list[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tables", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--readme", type=Path, default=README, help="where to put the short table")
    chosen = parser.parse_args(arguments)
    if not chosen.readme.is_file():
        parser.error(f"--readme: there is no file {chosen.readme}")
    results = Results(chosen.results)
    text = render(TEMPLATE.read_text(encoding="utf-8"), results)
    chosen.page.parent.mkdir(parents=True, exist_ok=True)
    chosen.page.write_text(text, encoding="utf-8", newline="\n")
    readme = with_headline(chosen.readme.read_text(encoding="utf-8"), results)
    chosen.readme.write_text(readme, encoding="utf-8", newline="\n")
    print(f"{chosen.page}, {chosen.readme}: written")


if __name__ == "__main__":
    main()
