"""The trials of a sweep, in Optuna's journal: shared by processes, and none lost with a process that is killed.

Who works on a trial holds its lock, which ends with the process. A trial that is under way but held by nobody was
killed: it is put in the queue again, with the folder of its run, so that training goes on where it was.
"""

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cswe._extras import require
from cswe.training.locking import Lock, locked
from cswe.training.randomness import seed_for
from cswe.training.space import Space

Method = Literal["grid", "tpe"]
Prune = Literal["none", "median", "halving"]
_RUN, _ERROR = "run", "error"


@dataclass
class Held:
    """A trial that this process works on."""

    trial: Any
    choices: dict[str, Any]
    run: str
    lock: Lock


class Trials:
    """The trials of a sweep.

    Parameters
    ----------
    folder
        The sweep's folder.
    space
        What is searched.
    method
        Every point of the grid; or so many points that a tree-structured Parzen estimator proposes.
    trials
        How many points, for the latter.
    prune
        When to break off a run that does worse than others did.
    epochs
        The longest run, for pruning.
    seed
        Decides what is proposed.
    """

    def __init__(
        self, folder: Path, space: Space, method: Method, trials: int, prune: Prune, epochs: int, seed: int
    ) -> None:
        optuna = require("optuna", "train")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._folder, self._space = optuna, folder, space
        self._method, self._wanted, self._seed = method, trials, seed
        folder.mkdir(parents=True, exist_ok=True)
        pruners = {
            "none": optuna.pruners.NopPruner,
            "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=epochs // 4),
            "halving": optuna.pruners.SuccessiveHalvingPruner,
        }
        # Resolved, since the journal may be opened from any working directory.
        file = (folder / "journal.log").resolve()
        backend = optuna.storages.journal.JournalFileBackend(str(file), lock_obj=_JournalLock(file))
        with self._alone():
            self.study = optuna.create_study(
                study_name="sweep",
                storage=optuna.storages.JournalStorage(backend),
                direction="maximize",
                load_if_exists=True,
                pruner=pruners[prune](),
            )
            if method == "grid":
                self._queue_grid()

    def next(self) -> Held | None:
        """Take a trial that nobody works on; None if there is none at the moment."""
        with self._alone():
            self._revive()
            if not self._anything_left():
                return None
            # What is proposed depends on the trials so far, not on the process that asks.
            seed = seed_for("sweep", self._seed, len(self.study.get_trials(deepcopy=False))) % 2**32
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.study.sampler = self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            trial = self.study.ask()
            lock = Lock(self._lock_file(trial.number))
            lock.wait()
            choices = self._space.suggest(trial)
            run = run_of(trial)
            trial.set_user_attr(_RUN, run)
            trial.set_user_attr("process", f"{socket.gethostname()}:{os.getpid()}")
            return Held(trial, choices, run, lock)

    def finish(self, held: Held, value: float | None, *, error: str | None = None) -> None:
        """Write down what came out of a trial: a value, no value (it was pruned), or an error."""
        states = self._optuna.trial.TrialState
        if error is not None:
            held.trial.set_user_attr(_ERROR, error)
            self.study.tell(held.trial, state=states.FAIL)
        elif value is None:
            self.study.tell(held.trial, state=states.PRUNED)
        else:
            self.study.tell(held.trial, value)
        held.lock.release(remove=True)

    def under_way(self) -> int:
        """Return how many trials processes are working on, this one or others."""
        return len(self._in("RUNNING"))

    def settled(self) -> list[Any]:
        """Return the trials that are through: with a value, pruned, or failed for a reason of their own."""
        failed = [trial for trial in self._in("FAIL") if _ERROR in trial.user_attrs]
        return sorted([*self._in("COMPLETE", "PRUNED"), *failed], key=run_of)

    def best(self) -> Any | None:
        """Return the trial with the largest value, the first of equal ones; None if none has one yet."""
        # By run, whose name stays the same however often it was killed and queued again.
        done = sorted(self._in("COMPLETE"), key=run_of)
        return max(done, key=lambda trial: trial.value, default=None)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with locked(self._folder / "sweep.lock"):
            yield

    def _lock_file(self, number: int) -> Path:
        return self._folder / "trials" / f"{number}.lock"

    def _in(self, *states: str) -> list[Any]:
        wanted = tuple(self._optuna.trial.TrialState[name] for name in states)
        trials: list[Any] = self.study.get_trials(deepcopy=False, states=wanted)
        return trials

    def _queue_grid(self) -> None:
        """Put every point of the grid in the queue that is not there yet: one killed amid this goes on with it."""
        there = {trial.user_attrs.get(_RUN) for trial in self.study.get_trials(deepcopy=False)}
        for number, point in enumerate(self._space.grid()):
            if f"{number:05d}" not in there:
                self.study.enqueue_trial(point, user_attrs={_RUN: f"{number:05d}"})

    def _anything_left(self) -> bool:
        if self._in("WAITING"):
            return True
        return self._method == "tpe" and len(self.settled()) + self.under_way() < self._wanted

    def _revive(self) -> None:
        """Queue the trials again whose process is gone."""
        for trial in self._in("RUNNING"):
            lock = Lock(self._lock_file(trial.number))
            if not lock.take():
                continue
            run = run_of(trial)
            others = self._in("WAITING", "RUNNING", "COMPLETE", "PRUNED")
            # Queued first and closed afterwards: killed in between, the next one only closes it.
            if not any(run_of(other) == run and other.number != trial.number for other in others):
                fixed = trial.system_attrs.get("fixed_params", {}) | trial.params
                self.study.enqueue_trial(fixed, user_attrs={_RUN: run})
            self.study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
            lock.release(remove=True)


def run_of(trial: Any) -> str:
    """Return the name of a trial's run: that of the first try, if it was killed and queued again."""
    return str(trial.user_attrs.get(_RUN, f"{trial.number:05d}"))


class _JournalLock:
    """Optuna's lock on its journal, as one that ends with its process; and a torn last line is taken off."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, Lock(file.with_name(f"{file.name}.lock"))

    def acquire(self) -> bool:
        self._lock.wait(0.001)
        with self._file.open("rb+") as stream:
            end = stream.seek(0, os.SEEK_END)
            if end:
                stream.seek(end - 1)
                if stream.read(1) != b"\n":
                    stream.seek(0)
                    stream.truncate(stream.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._lock.release()
