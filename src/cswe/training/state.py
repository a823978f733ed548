"""Everything that a run changes as it goes: saved together, restored together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cswe.constrained import PrimalDual
from cswe.nn import SWEPool
from cswe.training.checkpoint import (
    LAST,
    STATE,
    TENSORS,
    WEIGHTS,
    existing,
    read_json,
    read_tensors,
    reading,
    replace_folder,
    save_model,
    write_state,
)
from cswe.training.data import TrainingData
from cswe.training.model import Facts, Model
from cswe.training.optim import make_duals, make_optimizer
from cswe.training.randomness import global_seed, seed_for


@dataclass
class Progress:
    """How far a run is.

    Parameters
    ----------
    epoch, step
        Epochs finished, and steps done in the one begun.
    best, best_epoch
        The best validation score so far, and the number of the epoch that had it (from 1; 0: none yet).
    finished
        Nothing is left to do.
    sums
        Totals over the steps of the epoch begun: loss, samples, and SWGG per slice.
    """

    epoch: int = 0
    step: int = 0
    best: float | None = None
    best_epoch: int = 0
    finished: bool = False
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Add to a total of this epoch; it stays on its device, so that nothing has to wait."""
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value


@dataclass
class State:
    """Model, optimiser, multipliers and progress of one run."""

    model: Model
    optimizer: torch.optim.Optimizer
    duals: PrimalDual | None
    scaler: torch.amp.GradScaler
    progress: Progress

    @classmethod
    def start(cls, data: TrainingData, facts: Facts, device: torch.device) -> "State":
        """Build everything as it is before the first step; the same facts give the same weights."""
        recipe = facts.recipe
        with global_seed("weights", facts.seed):
            model = Model(facts)
        _start_from_data(model, data, facts)
        model.to(device)
        return cls(
            model,
            make_optimizer(model, recipe.optimization),
            make_duals(model.pool, recipe.bounding) if recipe.pooling.pool == "cswe" else None,
            torch.amp.GradScaler(device.type, enabled=recipe.optimization.precision == "float16"),
            Progress(),
        )

    def own(self) -> dict[str, Tensor]:
        """Return what differs, amid an epoch, between processes that train one model together."""
        buffers = {f"buffers.{name}": value for name, value in self.model.named_buffers() if value.is_floating_point()}
        return {f"sums.{name}": total for name, total in self.progress.sums.items()} | buffers

    def save(self, run: Path, notes: dict[str, Any], others: Sequence[dict[str, Tensor]] = ()) -> None:
        """Put the state in place of the run's last checkpoint, with what other processes have of their own."""
        theirs = {f"rank.{rank}.{name}": value for rank, own in enumerate(others, 1) for name, value in own.items()}

        def write(folder: Path) -> None:
            save_model(folder, self.model, notes)
            write_state(folder, self._numbers(), self._tensors() | theirs)

        replace_folder(run / LAST, write)

    def restore(self, run: Path, rank: int = 0) -> bool:
        """Go on from a run's last checkpoint; False if there is none yet."""
        folder = existing(run / LAST)
        if folder is None:
            return False
        self.model.load_state_dict(read_tensors(folder / WEIGHTS))
        tensors, numbers = read_tensors(folder / TENSORS), read_json(folder / STATE)
        device = next(self.model.parameters()).device
        self.optimizer.load_state_dict(
            {**self.optimizer.state_dict(), "state": _nested(_under(tensors, "optimizer."), device)}
        )
        if self.duals is not None:
            self.duals.load_state_dict(_under(tensors, "duals."))
        with reading(folder / STATE):
            progress, scaler = Progress(**numbers["progress"]), numbers["scaler"]
        if scaler:
            self.scaler.load_state_dict(scaler)
        own = _under(tensors, f"rank.{rank}.")
        for name, value in _under(own, "buffers.").items():
            self.model.get_buffer(name).copy_(value)
        progress.sums = {name: total.to(device) for name, total in _under(own or tensors, "sums.").items()}
        self.progress = progress
        return True

    def _numbers(self) -> dict[str, Any]:
        progress = {name: value for name, value in vars(self.progress).items() if name != "sums"}
        return {"progress": progress, "scaler": self.scaler.state_dict()}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"sums.{name}": total for name, total in self.progress.sums.items()}
        for number, memory in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in memory.items()}
        if self.duals is not None:
            tensors |= {f"duals.{name}": value for name, value in self.duals.state_dict().items()}
        return tensors


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _nested(tensors: dict[str, Tensor], device: torch.device) -> dict[int, dict[str, Tensor]]:
    memory: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        # The optimiser counts its steps on the CPU, whatever the device.
        memory.setdefault(int(number), {})[name] = tensor if name == "step" else tensor.to(device)
    return memory


@torch.no_grad()
def _start_from_data(model: Model, data: TrainingData, facts: Facts) -> None:
    """Take from the training set what the model starts from: spread of labels and tokens, slices, reference."""
    if facts.task == "regression":
        labels = data.labels()
        model.output_mean.copy_(labels.mean(0))
        model.output_spread.copy_(torch.where(labels.std(0) > 0, labels.std(0), 1.0))
    pooling = facts.recipe.pooling
    pool = model.pool
    if not (pooling.standardize or pooling.start == "data"):
        return
    sample = data.sample(torch.device("cpu"))
    valid = sample.tokens.flatten(0, 1) if sample.mask is None else sample.tokens[sample.mask]
    if model.statistics is not None:
        model.statistics.measure(valid.double())
    if isinstance(pool, SWEPool):
        if pooling.start == "data":
            pool.init_from(sample.tokens, sample.mask, seed=seed_for("start", facts.seed) % 2**31)
        elif pool.statistics is not None:
            pool.statistics.measure(valid.double())
