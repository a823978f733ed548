"""Find the runs that a page is about: folders of `cswe train` and `cswe compare`, in any mixture."""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cswe.report.style import COLOURS
from cswe.training.cells import RUNS, Cell, Result, read_results
from cswe.training.checkpoint import BEST, LAST, existing, load, read_json
from cswe.training.choices import WITH_SLICES, flat_choices
from cswe.training.compare import PLAN
from cswe.training.errors import UserError
from cswe.training.folder import RECIPE
from cswe.training.logging import LOG, Record, read_lines
from cswe.training.origin import noted_origin, same_origin
from cswe.training.recipe import Recipe
from cswe.training.table import UNFINISHED, Table
from cswe.training.task import check_metric, task_of

RESULT = "result.json"
_MOST_NAMED = 4  # choices that a name can tell; what else differs stands on the page


@dataclass(frozen=True)
class Run:
    """A training run on disk.

    Parameters
    ----------
    cell
        Pool, layer, slices, seed and recipe.
    log
        The record of every epoch.
    result
        Its scores, if it got so far.
    model
        The folder of its best model, if it was kept.
    command
        What repeats it.
    unfinished
        How far it got, if it was broken off or is still under way.
    """

    cell: Cell
    log: list[Record]
    result: Result
    model: Path | None
    command: str
    unfinished: str | None = None

    @property
    def label(self) -> str:
        """The pool's name, with the number of slices."""
        return self.cell.label

    @property
    def origin(self) -> dict[str, Any]:
        """What is known of the store that it was trained on."""
        return noted_origin(self.result.facts)


@dataclass
class Material:
    """Everything that a page shows."""

    runs: list[Run] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    store: Path | None = None
    noted_stores: list[Path] = field(default_factory=list)
    baseline: str | None = None

    def add(self, run: Run) -> None:
        """Take a run, unless it is there already; one with a score in place of one without."""
        same = [other for other in self.runs if run.cell == other.cell and same_origin(run.origin, other.origin)]
        if same and _completeness(run) <= _completeness(same[0]):
            return
        self.runs = [run if other in same else other for other in self.runs] if same else [*self.runs, run]
        self.commands.append(run.command)

    @property
    def results(self) -> list[Result]:
        """The scores of all runs."""
        return [run.result for run in self.runs]

    def table(self, metric: str | None = None) -> Table:
        """Return the table of all results."""
        if metric is not None:
            scored = (scores for result in self.results for scores in result.scores.values())
            check_metric(metric, dict.fromkeys(name for scores in scored for name in scores))
        # A baseline that had to be told apart from another has a longer name now.
        pools = [run.cell.pool for run in self.runs]
        known = [pool for pool in pools if self.baseline and f"{pool}:".startswith(f"{self.baseline}:")]
        return Table.of(self.results, metric, self.baseline if self.baseline in pools else next(iter(known), None))


def gather(paths: list[Path], store: Path | None = None) -> Material:
    """Read the folders of runs and comparisons.

    Parameters
    ----------
    paths
        Folders of `cswe train` (one run, or several seeds) or of `cswe compare`.
    store
        The tokens that they were trained on; by default what comparisons noted, where it is still there.
    """
    found = Material(store=store)
    for path in paths:
        if (path / PLAN).exists():
            _add_comparison(found, path)
        elif (path / RECIPE).exists():
            found.add(_read_run(path))
        elif seeds := sorted(folder for folder in path.glob("seed-*") if (folder / RECIPE).exists()):
            for folder in seeds:
                found.add(_read_run(folder))
        else:
            raise UserError(f"{path}: expected the folder of a run or of a comparison but found no {RECIPE} or {PLAN}")
    if not found.runs:
        raise UserError(f"{', '.join(map(str, paths))}: expected at least one finished run but there is none")
    if any(run.unfinished is None and run.result.error is None for run in found.runs):
        # Who looks at a run under way wants its scores so far; beside finished ones they would be averaged.
        found.runs = [
            replace(run, result=replace(run.result, error=run.unfinished)) if run.unfinished else run
            for run in found.runs
        ]
    found.runs = _tell_apart(found.runs)
    return found


def _completeness(run: Run) -> int:
    if run.result.error is not None:
        return 0
    return 1 if run.unfinished else 2


def _add_comparison(found: Material, path: Path) -> None:
    plan = read_json(path / PLAN)
    if missing := [name for name in ("command", "baseline", "store") if name not in plan]:
        raise UserError(f"{path / PLAN}: expected what a comparison writes but there is no {missing[0]!r}")
    found.commands += plan.get("commands", [plan["command"]])
    found.baseline = found.baseline or plan["baseline"]
    found.noted_stores.append(Path(plan["store"]))
    for result in read_results(path):
        folder = path / RUNS / result.cell.name
        found.add(Run(result.cell, read_lines(folder / LOG), result, existing(folder / BEST), plan["command"]))


def _read_run(path: Path) -> Run:
    noted = read_json(path / RECIPE)
    if "recipe" not in noted or "seed" not in noted:
        raise UserError(f"{path / RECIPE}: expected what a run writes but got something else, perhaps a recipe alone")
    recipe = Recipe.from_json(noted["recipe"])
    model = existing(path / BEST)
    told: dict[str, Any] = read_json(model / "model.json") if model else {}
    scores = {"validation": told["validation"]} if told else {}
    if (path / RESULT).exists():
        written = read_json(path / RESULT)
        scores |= {split: written[split] for split in ("validation", "test") if split in written}
    log = read_lines(path / LOG)
    slices = recipe.pooling.slices if recipe.pooling.pool in WITH_SLICES else None
    layer = int(told.get("layer", noted.get("layer", 0)))
    cell = Cell(recipe.pooling.pool, layer, slices, int(noted["seed"]), recipe)
    facts: dict[str, Any] = {
        "task": "classification",
        "seconds": sum(line["seconds"]["all"] for line in log),
        "store": noted_origin(noted),
    }
    size = 0
    if model is not None:
        loaded = load(model)
        size, facts["task"] = loaded.size, task_of(loaded.facts.labels)
    words = ["--recipe", str(path / RECIPE), "--layer", str(layer), "--seed", str(cell.seed), "--out", "NEW"]
    return Run(
        cell,
        log,
        Result(cell, size, scores, facts, None if told else "no epoch was finished"),
        model or existing(path / LAST),
        shlex.join(["cswe", "train", "STORE", *words]),
        _unfinished(recipe, log, told) if told else None,
    )


def _unfinished(recipe: Recipe, log: list[Record], best: dict[str, Any]) -> str | None:
    """Say how far a run got that has epochs left; one that was to stop early may have fewer."""
    epochs, patience = recipe.optimization.epochs, recipe.optimization.early_stop
    stopped = patience is not None and len(log) - int(best["epoch"]) >= patience
    return None if stopped or len(log) >= epochs else f"{UNFINISHED}: {len(log)} of {epochs} epochs"


def _tell_apart(runs: list[Run]) -> list[Run]:
    """Name runs of the same pool, at the same layer and number of slices, by the choices in which they differ.

    Where those are many, by their recipe.

    Runs on several stores have the store's number in their names, too, in the order in which they come.
    """
    told = []
    stores = _stores(runs)
    for run, store in zip(runs, stores, strict=True):
        mine = flat_choices(run.cell.recipe)
        alike = [other for other in runs if _place(other.cell) == _place(run.cell)]
        differing = {
            name: mine[name]
            for other in alike
            for name, value in flat_choices(other.cell.recipe).items()
            if value != mine[name]
        }
        if len(differing) > _MOST_NAMED:
            differing = {"recipe": _recipe_name(run.cell.recipe, [other.cell.recipe for other in alike])}
        choices = [
            *filter(None, [run.cell.pool.partition(":")[2]]),
            *(f"{k}={v}" for k, v in sorted(differing.items())),
            *([f"store={store}"] if max(stores) > 1 else []),
        ]
        pool = ":".join(filter(None, [run.cell.pool.partition(":")[0], ",".join(choices)]))
        cell = replace(run.cell, pool=pool)
        told.append(replace(run, cell=cell, result=replace(run.result, cell=cell)))
    return told


def _recipe_name(recipe: Recipe, others: list[Recipe]) -> str:
    """Return the name of a recipe; a number, in the order in which they come, where others have the same name."""
    distinct = [other for number, other in enumerate(others) if other not in others[:number]]
    names = [other.name for other in distinct]
    number = distinct.index(recipe)
    return names[number] if names[number] and names.count(names[number]) == 1 else str(number + 1)


def _stores(runs: list[Run]) -> list[int]:
    """Return the number of every run's store, counted from 1 as they come."""
    known: list[dict[str, Any]] = []
    numbers = []
    for run in runs:
        same = [number for number, origin in enumerate(known, 1) if same_origin(run.origin, origin)]
        if not same:
            known.append(run.origin)
        numbers.append(same[0] if same else len(known))
    return numbers


def _place(cell: Cell) -> tuple[str, int, int | None]:
    return cell.pool, cell.layer, cell.slices


def colours_of(results: list[Result]) -> dict[str, str]:
    """Give every pool a colour, in the order in which they come."""
    pools = dict.fromkeys(result.cell.pool for result in results)
    return {pool: COLOURS[number % len(COLOURS)] for number, pool in enumerate(pools)}
