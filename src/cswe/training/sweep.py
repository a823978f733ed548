"""Search the choices of a recipe, by validation alone: the test split is never looked at."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import sleep
from typing import Any

from cswe.tokens import Manifest
from cswe.training.checkpoint import BEST, LAST, check_folder, read_json, remove_folder, replace_text, write_json
from cswe.training.compare import Shelf, check_pool
from cswe.training.errors import TrainingError, UserError, is_own_fault
from cswe.training.fit import fit
from cswe.training.locking import locked
from cswe.training.logging import LOG, Record, read_lines
from cswe.training.origin import noted_origin, origin_of, same_origin
from cswe.training.parallel import Ranks, default_device
from cswe.training.recipe import Recipe
from cswe.training.space import Space
from cswe.training.task import CHOSEN_BY, task_of
from cswe.training.trials import Held, Method, Prune, Trials, run_of

PLAN, BEST_RECIPE, TABLE = "sweep.json", "best.json", "trials.csv"
_LEAD, _REST = ("run", "state", "validation"), ("epochs_done", "error")  # columns beside the choices
_WAIT = 0.5  # seconds between two looks at trials that others are working on


def sweep(
    store: str | Path,
    out: str | Path,
    recipe: Recipe,
    space: Space,
    *,
    method: Method | None = None,
    trials: int = 50,
    prune: Prune | None = None,
    seeds: int = 1,
    first_seed: int = 0,
    layer: int | None = None,
    device: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Recipe:
    """Train with every point of a grid, or with points that look promising, and return the best recipe.

    Parameters
    ----------
    store
        The store's folder.
    out
        The sweep's folder: Optuna's journal, logs of all runs, ``trials.csv``, and ``best.json``, a recipe.
    recipe
        Where the search starts; what the space does not name stays as it is.
    space
        What to search.
    method
        ``"grid"`` or ``"tpe"``; by default a grid if all values are listed.
    trials
        Points to try, for ``"tpe"``.
    prune
        ``"none"``, ``"median"`` or ``"halving"``: break off runs that do worse than others did at the same epoch. By
        default none for a grid, and the median for the other.
    seeds, first_seed
        Train every point with so many seeds; what counts is their mean validation score.
    layer
        The backbone's layer, if the store has several.
    device
        cpu or cuda; a GPU if there is one.
    tell
        Told a line about every trial.

    Returns
    -------
    Recipe
        The best by validation.
    """
    path, folder = Path(store), Path(out)
    check_folder(folder)
    if seeds < 1 or trials < 1:
        raise UserError(f"expected at least one seed and one trial but got {seeds} and {trials}")
    chosen: Method = method or ("grid" if space.listed else "tpe")
    pruning: Prune = prune or ("none" if chosen == "grid" else "median")
    manifest = Manifest.read(path)
    layers = sorted(manifest.spec.layers)
    if layer is None and len(layers) > 1:
        raise UserError(f"layer: expected one of {layers}, which the store holds, but got none")
    where = layers[0] if layer is None else layer
    if where not in layers:
        raise UserError(f"layer: expected one of {layers}, which the store holds, but got {layer}")
    score = CHOSEN_BY[task_of(manifest.spec.labels)]
    points = [recipe.with_(**point).check() for point in (space.grid() if chosen == "grid" else [space.first()])]
    for point in points:
        check_pool(point, manifest, where)  # now, rather than hours later
    numbers = list(range(first_seed, first_seed + seeds))
    plan = {
        "recipe": recipe.to_json(),
        "space": space.to_json(),
        "method": chosen,
        "seeds": numbers,
        "layer": where,
        "store": origin_of(manifest),
    }
    shelf = Shelf(path, default_device(device))
    shelf.data(where, points[0])  # what is wrong with the store is told now, too, and is no trial's fault
    _claim(folder, plan)
    search = Trials(folder, space, chosen, trials, pruning, recipe.optimization.epochs, first_seed)
    for trial in search.settled():
        _tidy(folder, run_of(trial))  # who was killed after the last epoch could not
    waiting = False
    while True:
        held = search.next()
        if held is None:
            if not search.under_way():
                break
            if not waiting:
                tell("waiting for trials that other processes are working on")
                waiting = True
            sleep(_WAIT)
            continue
        value, error = None, None
        try:
            try:
                point = _point(recipe, held.choices, manifest, where)
                value = _train(held, folder, point, shelf, where, numbers, score)
                if value is not None and not math.isfinite(value):
                    value, error = None, f"validation {score} is {value}"
            except Exception as failure:
                if not is_own_fault(failure):
                    raise
                error = str(failure).replace(f"{folder}/", "")
            search.finish(held, value, error=error)
        finally:
            held.lock.release()  # who was interrupted may search again in this very process, a notebook's say
        _tidy(folder, held.run)
        told = error or ("pruned" if value is None else f"validation {score} {100 * value:.2f}")
        tell(f"trial {held.run}: {_listed(held.choices)}: {told}")
        _write_results(folder, search, space, recipe)
    _write_results(folder, search, space, recipe)
    best = search.best()
    if best is None:
        raise TrainingError(f"no trial of {folder} came to an end with a score; {folder / TABLE} says why")
    return best_recipe(recipe, best.params)


def _tidy(folder: Path, run: str) -> None:
    """Remove the checkpoints of a trial that is through: its log and its score are what is kept."""
    for seed in (folder / "runs" / run).glob("seed-*"):
        for name in (BEST, LAST):
            with suppress(FileNotFoundError):  # another process, that has just begun, may tidy here, too
                remove_folder(seed / name)


def _point(recipe: Recipe, choices: dict[str, Any], manifest: Manifest, layer: int) -> Recipe:
    """Return the recipe of a trial; one that makes no sense is the trial's fault."""
    try:
        point = recipe.with_(**choices).check()
        check_pool(point, manifest, layer)
    except ValueError as error:
        raise TrainingError(str(error)) from None
    return point


def best_recipe(recipe: Recipe, choices: dict[str, Any]) -> Recipe:
    """Return a recipe with the choices of a trial, under a name of its own."""
    return recipe.with_(**choices, name=f"{recipe.name}-best")


def _train(
    held: Held, folder: Path, recipe: Recipe, shelf: Shelf, layer: int, seeds: list[int], score: str
) -> float | None:
    """Train all seeds, an epoch each in turn; return the mean of their best scores, or None if it was pruned."""
    data = shelf.data(layer, recipe)
    runs = [folder / "runs" / held.run / f"seed-{seed}" for seed in seeds]
    # Processes share a search trial by trial, those of a launcher, too.
    fits = [fit(data, run, seed=seed, resume=True, ranks=Ranks()) for seed, run in zip(seeds, runs, strict=True)]
    epochs = recipe.optimization.epochs
    reported = 0
    with ExitStack() as stack:
        for run in fits:
            stack.enter_context(closing(run))
        for reached in _rounds(fits):
            reported = _report(held, runs, score, reported, reached)
            if reported < epochs and held.trial.should_prune():
                return None
    _report(held, runs, score, reported, epochs)
    best = [max((line["validation"][score] for line in read_lines(run / LOG)), default=math.nan) for run in runs]
    return sum(best) / len(best)


def _report(held: Held, runs: list[Path], score: str, reported: int, reached: int) -> int:
    """Tell Optuna the mean score of every epoch reached that it has not been told of; return the last one."""
    scores = [[line["validation"][score] for line in read_lines(run / LOG)] for run in runs]
    last = min(reached, max(map(len, scores)))
    for epoch in range(reported, last):
        # A run that stopped early keeps its last score.
        mean = sum(values[min(epoch, len(values) - 1)] for values in scores) / len(scores)
        held.trial.report(mean, epoch + 1)
    return last


def _rounds(fits: Sequence[Iterator[Record]]) -> Iterator[int]:
    """Let runs take turns, those behind first; yield the epoch that all have reached which are not through."""
    reached = dict.fromkeys(fits, 0)
    while reached:
        # Of runs that were killed some may be an epoch ahead: the others catch up before any goes on.
        behind = min(reached.values())
        for run in [run for run, epoch in reached.items() if epoch == behind]:
            record = next(run, None)
            if record is None:
                del reached[run]
            else:
                reached[run] = record["epoch"]
        if reached:
            yield min(reached.values())


def _claim(folder: Path, plan: dict[str, Any]) -> None:
    """Write down what is searched, or check that it is what the folder was begun with."""
    with locked(folder / "sweep.lock"):
        if not (folder / PLAN).exists():
            write_json(folder / PLAN, plan)
            return
        there = read_json(folder / PLAN)
    differing = [name for name in plan if name != "store" and there.get(name) != plan[name]]
    differing += [] if same_origin(noted_origin(there), plan["store"]) else ["store"]
    if differing:
        raise UserError(
            f"{folder}: was begun with another {' and '.join(differing)}; use the same, or choose another folder"
        )


def _write_results(folder: Path, search: Trials, space: Space, recipe: Recipe) -> None:
    """Write all trials as a table, and the best as a recipe."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*_LEAD, *space.choices, *_REST])
    for trial in search.settled():
        lead = [trial.user_attrs.get("run"), trial.state.name.lower(), "" if trial.value is None else trial.value]
        epochs = max(trial.intermediate_values, default=0)
        chosen = [trial.params.get(name) for name in space.choices]
        writer.writerow([*lead, *chosen, epochs, trial.user_attrs.get("error", "")])
    best = search.best()
    with locked(folder / "sweep.lock"):
        replace_text(folder / TABLE, stream.getvalue())
        if best is not None:
            write_json(folder / BEST_RECIPE, best_recipe(recipe, best.params).to_json())


def best_line(folder: Path) -> str:
    """Tell in a line what a sweep found."""
    with (folder / TABLE).open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    done = [row for row in rows if row["state"] == "complete"]
    best = max(done, key=lambda row: float(row["validation"]))
    # In the table a choice that is no value is an empty field.
    chosen = ", ".join(f"{name}={value or None}" for name, value in best.items() if name not in (*_LEAD, *_REST))
    pruned, failed = (sum(row["state"] == state for row in rows) for state in ("pruned", "fail"))
    others = f"{len(rows)} trials, {pruned} of them pruned" + (f" and {failed} failed" if failed else "")
    return f"best of {others}: {chosen}; validation {100 * float(best['validation']):.2f}"


def _listed(choices: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in choices.items()
    )
