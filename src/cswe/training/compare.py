"""Train every pool with every number of slices and every seed: cell by cell, so that nothing is lost or done twice.

A finished cell is a JSON file, written aside and put in place. Several processes may share the folder: who works on a
cell holds its lock, which ends with the process.
"""

import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import torch

from cswe.tokens import Batches, Manifest, TokenStore
from cswe.training.cells import CELLS, RUNS, Cell, Plan, Result, read_results
from cswe.training.checkpoint import BEST, LAST, check_folder, existing, load, read_json, remove_folder, write_json
from cswe.training.data import TrainingData, scoring_size
from cswe.training.decisive import difference
from cswe.training.errors import PausedError, TrainingError, UnreadableError, UserError, is_own_fault
from cswe.training.fit import fit
from cswe.training.locking import Lock, locked
from cswe.training.logging import LOG, read_lines
from cswe.training.model import make_pool
from cswe.training.origin import noted_origin, origin_of, same_origin
from cswe.training.parallel import Ranks, default_device
from cswe.training.provenance import commit, machine, peak_memory, reset_peak, versions
from cswe.training.recipe import Recipe
from cswe.training.scoring import check_scores, lacks_scores, score_splits
from cswe.training.task import CHOSEN_BY

PLAN, LOCK = "compare.json", "compare.lock"
_WAIT = 0.5  # seconds between two looks at cells that others are working on


class MixedSeedsWarning(UserWarning):
    """Seeds of one row were trained with several recipes."""


class Shelf:
    """Batches of a store that many runs share: tokens are put on the device once for each layer.

    Parameters
    ----------
    store
        The store's folder.
    device
        Where batches are wanted.
    """

    def __init__(self, store: Path, device: torch.device) -> None:
        self._path, self._device = store, device
        self._open: tuple[tuple[Any, ...], TrainingData, Batches | None] | None = None

    def data(self, layer: int, recipe: Recipe) -> TrainingData:
        """Return training and validation set for a recipe."""
        return self._batches(layer, recipe)[0]

    def test(self, layer: int, recipe: Recipe) -> Batches | None:
        """Return the test set, if the store has one."""
        return self._batches(layer, recipe)[1]

    def _batches(self, layer: int, recipe: Recipe) -> tuple[TrainingData, Batches | None]:
        choice, scored = recipe.optimization, scoring_size(recipe, self._device)
        key = (layer, choice.max_tokens, choice.validation_share)
        if self._open is None or self._open[0] != key:
            self._open = None  # frees the device's memory before more is asked for
            store = TokenStore(self._path, layer)
            data = TrainingData.open(store, recipe, self._device)
            test = None
            if "test" in store.splits:
                test = Batches(store, scored, indices=store.split("test"), shuffle=False, device=self._device)
            self._open = (key, data, test)
        _, data, test = self._open
        check_pool(recipe, data.store.manifest, layer)
        shared = TrainingData(
            data.store,
            data.train.narrowed(batch_size=choice.batch_size),
            data.validation.narrowed(batch_size=scored),
            replace(data.facts, recipe=recipe),
        )
        return shared, None if test is None else test.narrowed(batch_size=scored)


def check_pool(recipe: Recipe, manifest: Manifest, layer: int) -> None:
    """Raise an error if a pool cannot be made, or the store lacks what it needs, before anything is computed."""
    if recipe.pooling.pool == "cls" and not manifest.spec.cls:
        raise UserError("pool cls: expected CLS vectors but the store has none; leave it out")
    with torch.device("meta"):
        make_pool(recipe.pooling, manifest.spec.layers[layer])


def compare(
    store: str | Path,
    out: str | Path,
    plan: Plan,
    *,
    baseline: str | None = None,
    device: str | None = None,
    test: bool = True,
    neighbors: bool = False,
    keep_models: bool = True,
    retry: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """Train all cells that are not there yet, and return the results of all.

    A cell that is there without scores that are asked for now is scored, if its model was kept.

    Parameters
    ----------
    store
        The store's folder.
    out
        The comparison's folder: ``cells/`` with a JSON file each, ``runs/`` with logs and best models.
    plan
        What to compare.
    baseline
        The pool that others are compared with, noted for the tables; by default the first.
    device
        cpu or cuda; a GPU if there is one.
    test
        Score the test split, too.
    neighbors
        Score vectors by themselves, too: the share of sets whose nearest training set is of their class.
    keep_models
        Keep every run's best model.
    retry
        Try cells again that failed.
    tell
        Told a line about every cell.

    Returns
    -------
    list of Result
        In the order of the plan.
    """
    path, folder, where = Path(store), Path(out), default_device(device)
    check_folder(folder)
    manifest = Manifest.read(path)
    cells = plan.cells(sorted(manifest.spec.layers))
    if baseline is not None and baseline not in plan.pools:
        raise UserError(f"baseline: expected one of {', '.join(plan.pools)} but got {baseline!r}")
    check_scores(manifest, neighbors=neighbors)
    for layer, recipe in dict.fromkeys((cell.layer, cell.recipe) for cell in cells):
        check_pool(recipe, manifest, layer)
    origin = origin_of(manifest)
    if retry:
        _forget_failed(folder, cells, origin)
    there = _look(folder, cells, origin).values()
    _check_folder(folder, cells, origin)
    note_plan(folder, path, plan, baseline, test=test, neighbors=neighbors, keep_models=keep_models)
    if test and any(lacks_scores(result, test=True, neighbors=False) for result in there):
        test = "test" in TokenStore(path, cells[0].layer).splits
    wanted = {"test": test, "neighbors": neighbors}
    done = _through(folder, there, wanted)
    if short := sum(lacks_scores(result, **wanted) for result in done.values()):
        tell(f"{short} of {len(cells)} cells stay without scores that are asked for now: their models were not kept")
    if done:
        tell(f"{len(done)} of {len(cells)} cells are there already")
    shelf = Shelf(path, where)
    waiting = False
    while missing := [cell for cell in cells if cell.name not in done]:
        busy = True
        for cell in missing:
            lock = Lock(folder / CELLS / f"{cell.name}.lock")
            if not lock.take():
                continue
            busy = False
            try:
                known = _look(folder, [cell], origin)
                # Another process may have finished it since we looked.
                if not (found := _through(folder, known.values(), wanted)):
                    run = folder / RUNS / cell.name
                    if known:
                        result = _completed(known[cell.name], run, shelf, **wanted)
                    else:
                        _clear_damage(folder, cell, tell)
                        result = run_cell(cell, run, shelf, test=test, neighbors=neighbors, keep_models=keep_models)
                    result.write(folder / CELLS / f"{cell.name}.json")
                    found = {cell.name: result}
                    tell(f"[{len(done) + 1:>{len(str(len(cells)))}}/{len(cells)}] {line_of(result)}")
                done |= found
                lock.release(remove=True)
            finally:
                lock.release()
        if busy:
            if not waiting:
                tell(f"waiting for {len(missing)} cells that other processes are working on")
                waiting = True
            sleep(_WAIT)
            done |= _through(folder, _look(folder, missing, origin).values(), wanted)
    return [done[cell.name] for cell in cells]


def note_plan(folder: Path, store: Path, plan: Plan, baseline: str | None, **options: bool) -> None:
    """Write down what is compared, for the tables, the report and whoever wants to run it again."""
    with locked(folder / LOCK):
        pools, commands, named = list(plan.pools), [], baseline
        if (folder / PLAN).exists():
            # A folder may grow: pools of an earlier plan keep their place, and its command is needed to run it again.
            earlier = read_json(folder / PLAN)
            pools = [*earlier["pools"], *(pool for pool in pools if pool not in earlier["pools"])]
            commands = earlier.get("commands", [earlier["command"]])  # earlier versions noted the last one alone
            baseline = baseline or earlier["baseline"]
            # The command must work in a new folder, too: a baseline taken over is named where it is among the command's
            # own pools, and not the first of them, which it takes anyway.
            named = named or (baseline if baseline in plan.pools[1:] else None)
        command = plan.command(store, folder, named, **options)
        content = {
            "store": str(store),
            "pools": pools,
            "baseline": baseline or pools[0],
            "command": command,
            "commands": list(dict.fromkeys([*commands, command])),
        }
        write_json(folder / PLAN, content)


def _look(folder: Path, cells: list[Cell], origin: dict[str, Any]) -> dict[str, Result]:
    """Return the results of the cells that are there; a damaged one is not."""
    found = {}
    for cell in cells:
        file = folder / CELLS / f"{cell.name}.json"
        try:
            result = Result.read(file) if file.exists() else None
        except UnreadableError:
            continue
        if result is None:
            continue
        if other := difference(result.cell.recipe, cell.recipe):
            raise UserError(f"{file}: was computed with another recipe ({other}); choose another folder")
        if not same_origin(noted_origin(result.facts), origin):
            raise UserError(f"{file}: was computed on another store; choose another folder")
        found[cell.name] = result
    return found


def _check_folder(folder: Path, cells: list[Cell], origin: dict[str, Any]) -> None:
    """Look at what else is in the folder, since tables compare pools seed by seed, and average a row over its seeds."""
    seeds = {(cell.layer, cell.seed) for cell in cells}
    rows = {(cell.pool, cell.layer, cell.slices): cell for cell in cells}
    mixed = {}
    for result in read_results(folder):
        there = result.cell
        if (there.layer, there.seed) in seeds and not same_origin(noted_origin(result.facts), origin):
            file = folder / CELLS / f"{there.name}.json"
            raise UserError(f"{file}: was computed on another store; choose another folder")
        mine = rows.get((there.pool, there.layer, there.slices))
        if mine is not None and (other := difference(there.recipe, mine.recipe)):
            mixed[f"{mine.label}, layer {mine.layer}"] = other
    for row, other in mixed.items():
        warnings.warn(
            f"{row}: other seeds were trained with another recipe ({other}), and the table averages over all of them; "
            "choose another folder to keep them apart",
            MixedSeedsWarning,
            stacklevel=3,
        )


def _through(folder: Path, results: Iterable[Result], wanted: dict[str, bool]) -> dict[str, Result]:
    """Return the results for which nothing is left to do, or nothing can be done."""
    return {
        result.cell.name: result
        for result in results
        if not lacks_scores(result, **wanted) or existing(folder / RUNS / result.cell.name / BEST) is None
    }


def _completed(result: Result, run: Path, shelf: Shelf, *, test: bool, neighbors: bool) -> Result:
    """Add scores that were not asked for when a cell was trained."""
    cell = result.cell
    data = shelf.data(cell.layer, cell.recipe).drawn(cell.seed)
    model = load(run / BEST, data.train.device)
    batches = shelf.test(cell.layer, cell.recipe) if test or "test" in result.scores else None
    scores = score_splits(model, data, batches, result.scores, seed=cell.seed, neighbors=neighbors)
    return replace(result, scores=scores)


def _clear_damage(folder: Path, cell: Cell, tell: Callable[[str], None]) -> None:
    """Make room for a cell, under its lock: say what is damaged, and remove it together with its run."""
    file = folder / CELLS / f"{cell.name}.json"
    if file.exists():
        tell(f"{file}: is damaged; this cell is done again")
        shutil.rmtree(folder / RUNS / cell.name, ignore_errors=True)
        file.unlink()


def _forget_failed(folder: Path, cells: list[Cell], origin: dict[str, Any]) -> None:
    for cell in cells:
        lock = Lock(folder / CELLS / f"{cell.name}.lock")
        if lock.take():
            if any(result.error is not None for result in _look(folder, [cell], origin).values()):
                shutil.rmtree(folder / RUNS / cell.name, ignore_errors=True)
                (folder / CELLS / f"{cell.name}.json").unlink()
            lock.release(remove=True)


def run_cell(
    cell: Cell,
    run: Path,
    shelf: Shelf,
    *,
    test: bool = True,
    neighbors: bool = False,
    keep_models: bool = True,
    keep_last: bool = True,
    stop: Callable[[], bool] = lambda: False,
    faults: tuple[type[Exception], ...] = (TrainingError, ValueError),
) -> Result:
    """Train one cell, or go on with it, and score its best model.

    Parameters
    ----------
    cell
        What to train.
    run
        The run's folder.
    shelf
        Where the tokens are.
    test, neighbors, keep_models
        As in `compare`.
    keep_last
        As in `fit`.
    stop
        Asked after every epoch but the last whether to break off.
    faults
        Errors that are its choices' fault, and which the result tells: others may be all right.

    Raises
    ------
    PausedError
        If `stop` said so.
    """
    data = shelf.data(cell.layer, cell.recipe).drawn(cell.seed)
    device = data.train.device
    reset_peak(device)
    error = None
    try:
        # Processes share a comparison cell by cell, those of a launcher, too.
        for record in fit(data, run, seed=cell.seed, resume=True, keep_last=keep_last, ranks=Ranks()):
            if record["epoch"] < cell.recipe.optimization.epochs and stop():
                raise PausedError(f"{cell.label}: broken off after {record['epoch']} epochs")
    except faults as failure:
        if not is_own_fault(failure):
            raise
        error = str(failure).replace(f"{run.parent.parent}/", "")  # wherever the folder may be moved to
    log = read_lines(run / LOG)
    facts: dict[str, Any] = {
        "task": data.facts.task,
        "epochs": len(log),
        "seconds": sum(record["seconds"]["all"] for record in log),
        "memory": peak_memory(device),
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "store": origin_of(data.store.manifest),
    }
    if error is not None:
        return Result(cell, 0, {}, facts, error)
    model = load(run / BEST, device)
    notes = read_json(run / BEST / "model.json")
    known = {"validation": notes["validation"]}
    batches = shelf.test(cell.layer, cell.recipe) if test else None
    scores = score_splits(model, data, batches, known, seed=cell.seed, neighbors=neighbors)
    # What is needed to go on with a run is not needed any more.
    remove_folder(run / LAST)
    if not keep_models:
        remove_folder(run / BEST)
    return Result(cell, model.size, scores, {**facts, "best_epoch": notes["epoch"]})


def line_of(result: Result) -> str:
    """Tell a result in a line."""
    cell = result.cell
    where = f"{cell.label}, layer {cell.layer}, seed {cell.seed}"
    if result.error is not None:
        return f"{where}: failed: {result.error}"
    name = CHOSEN_BY[result.facts["task"]]
    parts = [f"{split} {100 * scores[name]:.2f}" for split, scores in result.scores.items()]
    return f"{where}: {name} {', '.join(parts)}; {result.facts['seconds']:.1f} s"
