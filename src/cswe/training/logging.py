"""Where the record of an epoch goes: a file always, and wherever else is wanted."""

import json
from pathlib import Path
from typing import Any, Protocol

from cswe._extras import require
from cswe.training.checkpoint import replace_text

Record = dict[str, Any]
LOG = "log.jsonl"


class Logger(Protocol):
    """Anything with this one method can follow a run: Weights & Biases, MLflow, a list."""

    def write(self, record: Record) -> None:
        """Take the record of an epoch: numbers, lists of numbers (one per slice), and dictionaries of them."""


class JsonLines:
    """One line of JSON an epoch.

    Parameters
    ----------
    file
        The file to append to.
    epochs
        Epochs that are done: what the file says of later ones, by a run that was broken off, is removed.
    """

    def __init__(self, file: Path, epochs: int = 0) -> None:
        self._file = file
        kept = [line for line in read_lines(file) if line["epoch"] <= epochs] if epochs else []
        replace_text(file, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, record: Record) -> None:
        """Append a line."""
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")


class TensorBoard:
    """Scalars for TensorBoard; of numbers per slice, the mean and the extremes.

    Parameters
    ----------
    folder
        Where the event files go.
    """

    def __init__(self, folder: Path) -> None:
        require("tensorboard", "train")
        self._folder = folder
        self._writer: Any = None

    def write(self, record: Record) -> None:
        """Add the scalars of an epoch."""
        if self._writer is None:  # not before: the run's folder must be empty when it begins
            self._writer = require("torch.utils.tensorboard", "train").SummaryWriter(str(self._folder))
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["epoch"])
        self._writer.flush()


def scalars(record: Record, prefix: str = "") -> dict[str, float]:
    """Flatten a record to plain numbers.

    Examples
    --------
    >>> scalars({"epoch": 1, "swgg": {"dual": [1.0, 3.0]}})
    {'epoch': 1, 'swgg/dual/mean': 2.0, 'swgg/dual/min': 1.0, 'swgg/dual/max': 3.0}
    """
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list) and value:
            numbers = {"mean": sum(value) / len(value), "min": min(value), "max": max(value)}
            flat |= {f"{prefix}{name}/{kind}": number for kind, number in numbers.items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = value
    return flat


def read_lines(file: Path) -> list[Record]:
    """Read the records of a run; a last line that was not finished is left out."""
    if not file.exists():
        return []
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
