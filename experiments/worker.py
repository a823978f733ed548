"""One of several processes that work through the same studies: it takes the cell that matters most and that it can."""

import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cswe.tokens import TokenStoreError
from cswe.tokens.manifest import MANIFEST
from cswe.training.cells import Result
from cswe.training.checkpoint import LAST, remove_folder
from cswe.training.compare import Shelf, line_of, run_cell
from cswe.training.decisive import difference
from cswe.training.errors import PausedError, TrainingError
from cswe.training.locking import Lock, locked
from cswe.training.logging import LOG, Record, read_lines
from experiments.expect import Sizes, expected_seconds
from experiments.extract import is_being_made
from experiments.records import add_result, read_all
from experiments.studies import SEARCHES, STUDIES, Study, Task
from experiments.tuning import Chosen, Search, chosen_by, note_choices

# Where workers begin. Cells of images keep the device busy, the others the host: together they use both.
_HOMES = ("images", "images", "proteins", "images", "points", "images", "proteins", "images")
_WAIT = 1.0  # seconds between two looks for work
_GRACE = 60.0  # seconds that an extraction has to begin with a store that is waited for
_LONG = 20.0  # expected seconds from which a cell is worth going on with where it was broken off
_WORTH = 30.0  # seconds that must be left to begin one that will be broken off
BROKEN = 70  # exit status of a worker that another process should take the place of
_REHEARSAL = {"epochs": 1, "batch_size": 64}


@dataclass
class Worker:
    """A process that runs cells until nothing is left, or no time.

    Parameters
    ----------
    studies
        What to run.
    stores
        Folder of the token stores; one that an extraction is making, or begins with within a minute, is waited for.
    out
        Where results go.
    known
        Folders with results that need not be computed again.
    work
        Folder for locks and for what a run writes on its way; all workers of a machine share it.
    device
        Where to train.
    number, jobs
        Which of how many workers this is.
    until
        Time (`time.monotonic`) by which cells should be through: none is begun that is not expected to be.
    command
        What was asked for, noted with every result.
    rehearse
        One epoch of one seed of everything, to find out whether it runs; results mean nothing.
    deterministic
        Noted with every result.
    only
        Parts of names: only cells that have one of them in their own name or their store's; none: all cells.
    again
        Run cells that are known once more, write nothing, and say whether every score is exactly the known one.
    remake
        Beginnings of commits: cells that are known from one of them are taken for unknown, and what comes out takes the
        place of what is known; with `again`, only they are run.
    pause
        Begin long cells that will not be through by `until`, too, and break them off then: a worker with the same
        `work` goes on with them.
    beside
        How many processes of other commands share the device.
    tell
        Told a line about every cell.
    """

    studies: list[Study]
    stores: Path
    out: Path
    known: list[Path]
    work: Path
    device: torch.device
    number: int = 0
    jobs: int = 1
    until: float = float("inf")
    command: str = ""
    rehearse: bool = False
    deterministic: bool = False
    only: tuple[str, ...] = ()
    again: bool = False
    remake: tuple[str, ...] = ()
    pause: bool = False
    beside: int = 0
    tell: Callable[[str], None] = print
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = [self.out, *(folder for folder in self.known if folder != self.out)]
        self._lock = self.work / "results.lock"
        self._shelf: tuple[str, int, Shelf] | None = None
        self._noted: set[str] = set()
        self._remade = "-".join(("remade", *self.remake))
        self._absent: set[str] = set()
        self._patient_until = time.monotonic() + _GRACE
        # Cells take longer than they would alone; how much longer is learned. With 7 to 15 processes medians of a study
        # were 1 to 5 times, however many they were; more caution would leave long cells to the end, and then out.
        self._slowdown = 2.0 if self.jobs + self.beside > 1 else 1.0

    def run(self) -> int:
        """Work; return the number of cells done."""
        done, waiting = 0, ""
        while True:
            held = self._take()
            if isinstance(held, str):
                if not held.startswith("waiting") or time.monotonic() > self.until:
                    self.tell(f"worker {self.number}: {held}")
                    self.failed += sorted(self._absent)
                    return done
                if held != waiting:
                    self.tell(f"worker {self.number}: {held}")
                    waiting = held
                time.sleep(_WAIT)
                continue
            task, lock, expected = held
            try:
                done += self._do(task, expected)
                lock.release(remove=True)
            finally:
                lock.release()

    def outlook(self) -> list[str]:
        """List what is not done yet in the order of its waves, and what it should take alone on an H200."""
        missing, later = self._tasks()
        lines, total, unknown = [], 0.0, 0
        for task in sorted(missing, key=lambda task: task.wave):
            sizes = _sizes(self.stores / task.store)
            if sizes is None:
                unknown += 1
                expected = "?"
            else:
                seconds = expected_seconds(task.cell.recipe, task.cell.layer, sizes)
                total += seconds
                expected = f"{seconds:.0f} s"
            lines.append(f"wave {task.wave:2}  {expected:>6}  {task.study.name}: {task.cell.name}")
        told = f"{len(missing)} cells, {total:.0f} s by one process alone"
        told += f"; {unknown} of them on stores that are not there" if unknown else ""
        told += f"; more will be known by {later}" if later else ""
        return [*lines, told]

    def _tasks(self) -> tuple[list[Task], str]:
        """List what is not done yet, and name the search that more will be known by later, if there is one."""
        missing: list[Task] = []
        later = ""
        for study in self.studies:
            chosen = self._chosen(study.search)
            missing += self._open_tasks(study, chosen)
            # Waiting makes sense only while the choices are being found out.
            wanting = study.search is not None and len(chosen) < len(study.search.sought) and not self.again
            if study.search is not None and wanting and self._is_running(study.search):
                later = study.search.name
        return missing, later

    def _open_tasks(self, study: Study, chosen: Chosen) -> list[Task]:
        done = read_all(self.known, study.name)
        return [self._rehearsed(task) for task in study.tasks(chosen) if self._is_open(task, done)]

    def _chosen(self, search: Search | None) -> Chosen:
        if search is None:
            return {}
        if search.name not in self._noted and not self.again:
            self._note_choices(search)  # of a search that was done elsewhere
        return chosen_by(search, self.known)

    def _is_running(self, search: Search) -> bool:
        study = STUDIES[search.name]
        return study in self.studies and bool(self._open_tasks(study, {}))

    def _is_open(self, task: Task, done: dict[str, Result]) -> bool:
        if self.rehearse and task.cell.seed not in (0, 10):
            return False
        if self.only and not any(text in task.cell.name or text in task.store for text in self.only):
            return False
        found = done.get(task.cell.name)
        if found is not None and not self.rehearse and (other := difference(found.cell.recipe, task.cell.recipe)):
            if task.study.search is None:
                raise ValueError(
                    f"{task.study.name}, {task.cell.name}: is known with another recipe "
                    f"({other}); remove it from the results first"
                )
            found = None  # of a choice that was made among fewer points
        if self._mark(task, "failed").exists():
            return False
        # Once, also where what makes it now is that commit itself.
        remade = self._mark(task, self._remade).exists()
        stale = found is not None and str(found.facts.get("commit")).startswith(self.remake) and not remade
        if not self.again:
            return found is None or stale
        return (stale if self.remake else found is not None) and not self._mark(task, "again").exists()

    def _mark(self, task: Task, what: str) -> Path:
        """Return the file that tells all workers what became of a cell."""
        return self.work / what / task.study.name / task.cell.name

    def _rehearsed(self, task: Task) -> Task:
        if not self.rehearse:
            return task
        return replace(task, cell=replace(task.cell, recipe=task.cell.recipe.with_(**_REHEARSAL)))

    def _take(self) -> tuple[Task, Lock, float] | str:
        """Take the cell that matters most to this worker; or say why there is none."""
        missing, later = self._tasks()
        waiting = f"waiting for {later}" if later else ""
        short = False
        self._absent = set()
        for task in sorted(missing, key=self._priority):
            if _sizes(self.stores / task.store) is None:
                if time.monotonic() < self._patient_until or is_being_made(self.stores, task.store):
                    waiting = f"waiting for {self.stores / task.store}"
                else:
                    self._absent.add(task.store)
                continue
            expected = self._expected(task)
            if time.monotonic() + self._needed(task, expected) > self.until:
                short = True
                continue
            lock = Lock(self.work / "locks" / task.study.name / f"{task.cell.name}.lock")
            if not lock.take():
                continue
            if not self._is_open(task, read_all(self.known, task.study.name)):  # by another since we looked
                lock.release(remove=True)
                continue
            return task, lock, expected
        if waiting:
            return waiting
        told = ["no time left for another cell"] if short else []
        told += [
            f"there is no store {self.stores / name} and nobody makes it: python -m experiments.extract {name}"
            for name in sorted(self._absent)
        ]
        return "; ".join(told) or "nothing left to begin"

    def _needed(self, task: Task, expected: float) -> float:
        """Return the seconds that must be left to begin a cell, or to go on with it."""
        if self._pausable(expected):
            return _WORTH
        left = 1 - _epochs_done(self._run(task)) / task.cell.recipe.optimization.epochs
        return left * expected * self._slowdown

    def _pausable(self, expected: float) -> bool:
        return self.pause and expected >= _LONG

    def _run(self, task: Task) -> Path:
        return self.work / "runs" / task.study.name / task.cell.name

    def _priority(self, task: Task) -> tuple[Any, ...]:
        """Own family first, then by wave; within a wave the tokens that are at hand, or that others have not.

        Of those the longest first: begun last, it would keep one process busy when all others have nothing left.
        """
        home = _HOMES[self.number % len(_HOMES)]
        here = self._shelf is not None and self._shelf[:2] == (task.store, task.cell.layer)
        return (
            task.study.family != home,
            task.wave,
            not here,
            (task.cell.layer // 3 - self.number) % 3,
            -self._expected(task),
        )

    def _expected(self, task: Task) -> float:
        """Return the seconds that a cell should take alone; 0 while its store is not there."""
        sizes = _sizes(self.stores / task.store)
        return 0.0 if sizes is None else expected_seconds(task.cell.recipe, task.cell.layer, sizes)

    def _do(self, task: Task, expected: float) -> int:
        run = self._run(task)
        if not (begun := _epochs_done(run)):
            shutil.rmtree(run, ignore_errors=True)  # of a process that was killed
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other workers may need what the last cell does not any more
        started = time.monotonic()
        study = task.study
        try:
            result = run_cell(
                task.cell,
                run,
                self._opened(task),
                test=study.test,
                neighbors=study.neighbors,
                keep_models=False,
                keep_last=self._pausable(expected),
                stop=lambda: self._pausable(expected) and time.monotonic() > self.until,
                faults=(TrainingError,),  # anything else is a mistake of ours, and no result
            )
        except PausedError as paused:
            self.tell(f"[{self.number}] {study.name}: {paused}, after {time.monotonic() - started:.0f} s")
            return 0
        except Exception:
            # Whatever it is, other cells may be all right, and time on the device is dear.
            self.tell(f"{study.name}: {task.cell.name} broke down\n{traceback.format_exc(limit=-5)}")
            self.failed.append(task.cell.name)
            _touch(self._mark(task, "failed"))
            self._shelf = None
            if not _usable(self.device):
                self.tell(f"worker {self.number}: the device is of no use to this process any more")
                raise SystemExit(BROKEN) from None
            return 0
        wall = time.monotonic() - started
        if not begun:
            self._slowdown = 0.5 * self._slowdown + 0.5 * max(1.0, wall / expected)
        if self.again:
            remove_folder(run)
            self._hold_against(task, result)
            return 1
        facts: dict[str, Any] = {
            **result.facts,
            "wall": wall,
            "processes": self.jobs + self.beside,
            "deterministic": self.deterministic,
            "command": self.command,
        }
        if study.keep_log:
            facts["log"] = _rounded(read_lines(run / LOG))
        kept = read_all(self.known, study.name)
        add_result(self.out, study.name, replace(result, facts=facts), kept, self._lock)
        if self.remake:
            _touch(self._mark(task, self._remade))
        remove_folder(run)
        if (search := SEARCHES.get(study.name)) is not None:
            self._note_choices(search)
        note = f"expected {expected:.0f} s, took {wall:.0f} s"
        before = kept.get(task.cell.name)
        if before is not None and not difference(before.cell.recipe, task.cell.recipe):
            note += f"; against {str(before.facts.get('commit'))[:7]} {_comparison(before, result)[1]}"
        self.tell(f"[{self.number}] {study.name}: {line_of(result)} ({note})")
        return 1

    def _hold_against(self, task: Task, result: Result) -> None:
        """Say whether a cell that was run again has exactly the scores that are known."""
        known = read_all(self.known, task.study.name)[task.cell.name]
        same, told = _comparison(known, result)
        if not same:
            self.failed.append(task.cell.name)
        self.tell(f"[{self.number}] {task.study.name}: {task.cell.name}: {told}")
        _touch(self._mark(task, "again"))

    def _opened(self, task: Task) -> Shelf:
        """Return the store's tokens; those of one layer of one store are held at a time."""
        if self._shelf is None or self._shelf[0] != task.store:
            self._shelf = None  # frees the device's memory before more is asked for
            self._shelf = (task.store, task.cell.layer, Shelf(self.stores / task.store, self.device))
        self._shelf = (task.store, task.cell.layer, self._shelf[2])
        return self._shelf[2]

    def _note_choices(self, search: Search) -> None:
        with locked(self._lock):
            note_choices(search, read_all(self.known, search.name).values(), self.known)
        self._noted.add(search.name)


def _usable(device: torch.device) -> bool:
    """Say whether a device still computes: after some errors it does nothing more for the process that met them."""
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
            torch.ones(1, device=device).sum().item()
        except RuntimeError:
            return False
    return True


def _epochs_done(run: Path) -> int:
    """Return how many epochs of a run that was broken off need not be made again."""
    return len(read_lines(run / LOG)) if (run / LAST).exists() else 0


def _touch(mark: Path) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _comparison(known: Result, result: Result) -> tuple[bool, str]:
    """Say whether every score is exactly the known one, and if not, which are which."""
    there, now = (_flat_scores(entry) for entry in (known, result))
    different = [
        f"{name}: {there.get(name)} there, {now.get(name)} now"
        for name in sorted(there | now)
        if there.get(name) != now.get(name)
    ]
    return not different, f"differs in {', '.join(different)}" if different else f"all {len(there)} scores are the same"


def _flat_scores(result: Result) -> dict[str, Any]:
    """Return all scores as they are written, under one name each: not-a-number is null there, and equal to itself."""
    scores: dict[str, dict[str, Any]] = result.to_json()["scores"]
    flat = {f"{split} {name}": value for split, values in scores.items() for name, value in values.items()}
    return flat if result.error is None else {"error": result.error}


@cache
def _measured(store: Path, version: int) -> Sizes | None:
    return Sizes.of(store)


def _sizes(store: Path) -> Sizes | None:
    """Measure a store, once for each version of its manifest; None if it is not there or not finished."""
    try:
        return _measured(store, (store / MANIFEST).stat().st_mtime_ns)
    except (OSError, TokenStoreError, ValueError):
        return None


def _rounded(log: list[Record]) -> list[Record]:
    """Keep what a figure shows: five digits are more than a line is wide."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: short(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [short(entry) for entry in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    kept = ("epoch", "loss", "validation", "swgg", "swgg_exact")
    return [{name: short(record[name]) for name in kept if name in record} for record in log]
