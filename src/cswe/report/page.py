"""The page: everything that is known of some runs in one HTML file that needs nothing else."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cswe import __version__
from cswe._extras import require
from cswe.report.accuracy import draw_accuracy, draw_curves, draw_differences
from cswe.report.evolution import draw_evolution
from cswe.report.gather import Material, Run, colours_of
from cswe.report.panels import Figure
from cswe.report.slices import EXPLANATION, draw_slices, look_at
from cswe.tokens import Manifest, TokenStore
from cswe.tokens.errors import TokenStoreError
from cswe.tokens.manifest import digest
from cswe.training.cells import label_of
from cswe.training.checkpoint import load, replace_text
from cswe.training.choices import flat_choices
from cswe.training.errors import UserError
from cswe.training.origin import origin_of, same_origin
from cswe.training.provenance import versions
from cswe.training.table import CLEAR, UNFINISHED, Table
from cswe.training.verdict import metric_name, verdict

_LOOKED_AT = 2  # pools whose slices are drawn
_LONGEST_NAME = 80  # of a figure's file, before what comes after it


@dataclass(frozen=True)
class Section:
    """A part of the page: a heading, a sentence, figures, and a table."""

    name: str
    title: str
    lead: str = ""
    figures: list[Figure] = field(default_factory=list)
    grid: dict[str, Any] | None = None


@dataclass
class Page:
    """What the template fills in."""

    title: str
    summary: str
    facts: list[tuple[str, str]]
    sections: list[Section]
    choices: dict[str, Any]
    versions: dict[str, str]
    commands: list[str]

    def html(self) -> str:
        """Return the page."""
        jinja = require("jinja2", "report")
        template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        environment = jinja.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        text: str = environment.from_string(template).render(page=self, version=__version__)
        return text

    def write(self, folder: Path, *, figures: bool = True) -> list[Path]:
        """Write ``index.html`` and, if wanted, every figure as SVG and PNG under ``figures/``."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "index.html", self.html())
        files = [folder / "index.html"]
        for section in self.sections if figures else ():
            for figure in section.figures:
                files += figure.save(folder / "figures")
        return files


def build_page(
    material: Material, *, title: str = "Comparison of poolings", metric: str | None = None, slices: int | None = None
) -> Page:
    """Draw and write up everything.

    Parameters
    ----------
    material
        What `gather` found.
    title
        The page's title.
    metric
        The score shown; by default the one that epochs are chosen by.
    slices
        The number of slices at which runs are looked at closely; by default 16, or the nearest there is.
    """
    table = material.table(metric)
    colours = colours_of(material.results)
    chosen = _closely(material.runs, slices)
    one_a_pool = list({run.cell.pool: run for run in reversed(chosen)}.values())[::-1]
    stores = Stores(material)
    sections = [Section("results", "Results", _lead(table), [draw_accuracy(table, colours)], _result_grid(table))]
    if differences := draw_differences(table, colours):
        against = label_of(table.baseline)
        lead = (
            f"The same seed with another pooling than {against}: points of difference (standard error). Clear: {CLEAR}."
        )
        sections.append(Section("differences", f"Against {against}", lead, [differences], _difference_grid(table)))
    if any(run.log for run in chosen):
        sections.append(Section("training", "Training", "", [draw_curves(chosen, table.metric, colours)]))
    if evolution := draw_evolution(one_a_pool, colours):
        lead = "What the slices did under the bound D ≤ ε + s, and without it."
        sections.append(Section("evolution", "SWGG, slack and dual variables", lead, [evolution]))
    if looks := _slices(one_a_pool, stores):
        sections.append(Section("slices", "Slices", f"{EXPLANATION} {stores.note}".strip(), looks))
    return Page(
        title,
        verdict(table),
        _facts(material, table, stores.of(chosen[0])),
        sections,
        _choices(material.runs),
        _versions(material),
        list(dict.fromkeys(material.commands)),
    )


def _closely(runs: list[Run], slices: int | None) -> list[Run]:
    """Choose the runs at the last layer with one number of slices, and those that have none."""
    layer = max(run.cell.layer for run in runs)
    counts = {run.cell.slices for run in runs if run.cell.slices is not None}
    if slices is not None and slices not in counts:
        raise UserError(f"slices: expected one of {sorted(counts)} but got {slices}")
    if slices is None and counts:
        # The paper looks at 16.
        slices = min(counts, key=lambda count: (max(count / 16, 16 / count), count))
    return [run for run in runs if run.cell.layer == layer and run.cell.slices in (None, slices)]


class Stores:
    """The tokens that runs were trained on, where they are known and can still be read."""

    def __init__(self, material: Material) -> None:
        self.note = ""
        self._manifests: dict[Path, Manifest] = {}
        self._open: dict[tuple[Path, int], TokenStore] = {}
        if material.store is not None:
            # Asked for: what is wrong with it must be said.
            self._manifests[material.store] = manifest = Manifest.read(material.store)
            if not any(same_origin(run.origin, origin_of(manifest)) for run in material.runs):
                raise UserError(f"--store {material.store}: none of these runs was trained on these tokens")
            return
        for path in dict.fromkeys(material.noted_stores):
            try:
                self._manifests[path] = Manifest.read(path)
            except (TokenStoreError, OSError) as error:
                self._miss(str(error))

    def of(self, run: Run) -> TokenStore | None:
        """Return the tokens of a run; those of another store, though they might fit, would tell lies."""
        for path, manifest in self._manifests.items():
            if not same_origin(run.origin, origin_of(manifest)) or run.cell.layer not in manifest.spec.layers:
                continue
            where = path, run.cell.layer
            try:
                self._open[where] = self._open.get(where) or TokenStore(path, run.cell.layer)
            except (TokenStoreError, ValueError, OSError) as error:
                self._miss(str(error))
                continue
            return self._open[where]
        self._miss(f"those of {run.label} are not known")
        return None

    def _miss(self, reason: str) -> None:
        self.note = self.note or f"The profiles of classes need the tokens: give --store ({reason})."


def _slices(runs: list[Run], stores: Stores) -> list[Figure]:
    figures: list[Figure] = []
    # One with the bound and one without it.
    families = {run.cell.pool.partition(":")[0]: run for run in reversed(runs)}
    for run in sorted(families.values(), key=lambda run: not run.cell.pool.startswith("cswe")):
        if run.model is None or run.cell.slices is None or len(figures) == _LOOKED_AT:
            continue
        if seen := look_at(load(run.model), stores.of(run)):
            figures.append(draw_slices(seen, _file_name(run.cell.name), f"{run.label}, seed {run.cell.seed}"))
    return figures


def _file_name(name: str) -> str:
    """Make a name that any file system takes, and that stays the only one of its kind."""
    plain = name.replace(".", "-")
    return plain if len(plain) <= _LONGEST_NAME else f"{plain[:_LONGEST_NAME]}-{digest(plain)[:8]}"


def _lead(table: Table) -> str:
    counts = sorted({len(row.whole) for row in table.rows if row.whole}) or [0]
    seeds = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    plural = "seed" if seeds == "1" else "seeds"
    return f"{metric_name(table.metric).capitalize()} in percent, mean (standard deviation) over {seeds} {plural}."


def _result_grid(table: Table) -> dict[str, Any]:
    """Lay the results out as the paper does: layers side by side, each with its splits."""
    best = {(layer, split): _top(table, layer, split) for layer in table.layers for split in table.splits}
    rows = []
    for pool, slices in dict.fromkeys((row.pool, row.slices) for row in table.rows):
        found = {layer: table.find(pool, layer, slices) for layer in table.layers}
        known = [row for row in found.values() if row is not None]
        cells = []
        for layer, row in found.items():
            for split in table.splits:
                mean = None if row is None else row.mean(split, table.metric)
                text, _, spread = ("–" if mean is None else mean.text()).partition(" ")
                top = split != "train" and mean is not None and mean.mean == best[layer, split]
                cells.append({"text": text, "spread": spread, "best": top})
        note = "; ".join(sorted({row.note for row in known if row.note}))
        rows.append({"name": label_of(pool), "note": note, "lead": ["" if slices is None else slices], "cells": cells})
    groups = [(f"Layer {layer}", len(table.splits)) for layer in table.layers] if len(table.layers) > 1 else []
    heads = [split.capitalize() for _ in table.layers for split in table.splits]
    return {"lead": ["L"], "groups": groups, "heads": heads, "rows": rows}


def _top(table: Table, layer: int, split: str) -> float:
    means = (row.mean(split, table.metric).mean for row in table.at(layer))
    return max(filter(math.isfinite, means), default=math.nan)


def _difference_grid(table: Table) -> dict[str, Any]:
    several = len(table.layers) > 1
    rows = []
    for entry in table.differences("test" if "test" in table.splits else "validation"):
        text, _, spread = entry.mean.text(signed=True, error=True).replace("-", "−").partition(" ")
        lead = ["" if entry.slices is None else entry.slices] + ([entry.row.layer] if several else [])
        cells = [
            {"text": text, "spread": spread, "best": False},
            {"text": "yes" if entry.clear else "no", "spread": "", "best": entry.clear},
        ]
        rows.append({"name": entry.row.label, "note": "", "lead": lead, "cells": cells})
    heads = ["Points", "Clear"]
    return {"lead": ["L", "Layer"] if several else ["L"], "groups": [], "heads": heads, "rows": rows}


def _facts(material: Material, table: Table, store: TokenStore | None) -> list[tuple[str, str]]:
    seconds = sum(result.facts.get("seconds", 0.0) for result in material.results)
    facts = [("Runs", f"{len(material.results)}")]
    errors = [result.error for result in material.results if result.error is not None]
    unfinished = sum(error.startswith(UNFINISHED) for error in errors)
    facts += [("Failed", f"{len(errors) - unfinished}")] if len(errors) > unfinished else []
    facts += [("Unfinished", f"{unfinished}")] if unfinished else []
    facts.append(("Training", f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"))
    if store is not None:
        facts.append(("Sets", f"{len(store):,}"))
        facts.append(("Tokens", f"{int(store.lengths.sum()):,} of dimension {store.dim}"))
        if store.label_names:
            facts.append(("Classes", f"{len(store.label_names)}"))
        backbone = store.spec.backbone.get("name")
        facts += [("Backbone", str(backbone))] if backbone else []
    facts += [("Layers", ", ".join(map(str, table.layers)))] if len(table.layers) > 1 else []
    devices = {str(result.facts["machine"]["device"]) for result in material.results if "machine" in result.facts}
    facts += [("Device", ", ".join(sorted(devices)))] if devices else []
    return facts


def _choices(runs: list[Run]) -> dict[str, Any]:
    """Split the choices into those that all runs share and those in which they differ."""
    recipes = [flat_choices(run.cell.recipe) for run in runs]
    names = list(recipes[0])
    shared = {name: recipes[0][name] for name in names if all(recipe[name] == recipes[0][name] for recipe in recipes)}
    varied = {name: {recipe[name] for recipe in recipes} for name in names if name not in shared}
    return {"shared": shared, "varied": {name: ", ".join(_in_order(values)) for name, values in varied.items()}}


def _in_order(values: set[Any]) -> list[str]:
    """Print values, numbers by size and before the rest."""
    return [str(value) for value in sorted(values, key=lambda value: (isinstance(value, str), value is None, value))]


def _versions(material: Material) -> dict[str, str]:
    """Return the versions that runs were made with; of this page's, where runs do not say."""
    found: dict[str, list[str]] = {}
    for result in material.results:
        for name, value in result.facts.get("versions", {}).items():
            found.setdefault(name, []).append(value)
        if result.facts.get("commit"):
            found.setdefault("commit", []).append(str(result.facts["commit"])[:12])
    if not found:
        return versions()
    return {name: ", ".join(dict.fromkeys(values)) for name, values in found.items()}
