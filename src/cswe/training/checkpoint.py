"""Models and runs as folders: safetensors and JSON, put in place whole. Nothing is ever unpickled."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cswe.training.errors import UnreadableError, UserError
from cswe.training.model import Facts, Model

FORMAT, VERSION = "cswe-model", 1
MODEL, WEIGHTS = "model.json", "model.safetensors"
STATE, TENSORS = "training.json", "training.safetensors"
BEST, LAST = "best", "last"


def check_folder(folder: Path) -> None:
    """Raise an error if a folder cannot be made since a file is in its place, or in that of one above it."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise UserError(
                f"{folder}: expected a folder but {'it' if place == folder else place} is a file; choose another"
            )


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Name the file in errors about what it says; what it lacks, or has of another kind, is damage."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(
            f"{file}: is damaged ({type(error).__name__}: {error}); restore it from a copy, or train again"
        ) from None


def save_model(folder: Path, model: Model, notes: dict[str, Any]) -> None:
    """Write a model into a folder, beside what else may be said of it (epoch, scores)."""
    content = {"format": FORMAT, "version": VERSION, **model.facts.to_json(), **notes}
    _write_json(folder / MODEL, content)
    _write_tensors(folder / WEIGHTS, model.state_dict())


def load(path: str | Path, device: str | torch.device = "cpu") -> Model:
    """Load a trained model, ready for use: ``model.embed(tokens, mask)``, ``model(tokens, mask)``.

    Parameters
    ----------
    path
        The folder of a run, for its best model; or the folder of a model, ``run/last`` say.
    device
        Where to put it.

    Returns
    -------
    Model
        In evaluation mode, with ``facts``: recipe, label names, and which tokens it was made for.
    """
    folder = model_folder(Path(path))
    content = read_json(folder / MODEL)
    if content.get("format") != FORMAT:
        raise UserError(f"{folder / MODEL}: expected a model of cswe but got something else")
    if content.get("version") != VERSION:
        raise UserError(f"{folder / MODEL}: expected version {VERSION} but got {content.get('version')}; update cswe")
    with reading(folder / MODEL):
        facts = Facts.from_json(content)
    model = Model(facts)
    tensors = read_tensors(folder / WEIGHTS)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{folder / WEIGHTS}: does not belong to {folder / MODEL} ({reason})") from None
    return model.to(device).eval()


def model_folder(path: Path) -> Path:
    """Find the folder of a model: the path itself, or the best model of the run that it is."""
    for candidate in (path, path / BEST, path / LAST):
        if (whole := existing(candidate)) is not None and (whole / MODEL).exists():
            return whole
    seeds = sorted(child.name for child in path.glob("seed-*")) if path.is_dir() else []
    hint = f"; it holds several runs: choose one of {', '.join(seeds)}" if seeds else ""
    raise UserError(f"{path}: expected the folder of a model or of a run but found no {MODEL} in it{hint}")


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Write a folder aside, then put it in place of the old one.

    Killed at any moment, there is a whole folder under `target` or, for the blink between two renames, under the name
    that `existing` looks at too.
    """
    tidy(target)
    aside, old = _aside(target), _old(target)
    aside.mkdir(parents=True)
    write(aside)
    _sync(aside)
    if target.exists():
        target.rename(old)
    aside.rename(target)
    _sync(target.parent)
    tidy(target)


def existing(target: Path) -> Path | None:
    """Return where a folder written by `replace_folder` is, or None if it was never finished."""
    if target.is_dir():
        return target
    old = _old(target)
    return old if old.is_dir() else None


def remove_folder(target: Path) -> None:
    """Remove a folder so that, killed at any moment, `existing` finds a whole one or none."""
    tidy(target)
    for folder in (target, _old(target)):
        if folder.is_dir():
            folder.rename(_aside(target))
            shutil.rmtree(_aside(target), ignore_errors=True)


def tidy(target: Path) -> None:
    """Remove what `replace_folder` and `remove_folder` leave beside a folder when they are killed."""
    shutil.rmtree(_aside(target), ignore_errors=True)
    if target.is_dir():
        shutil.rmtree(_old(target), ignore_errors=True)


def _aside(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def _old(target: Path) -> Path:
    return target.with_name(target.name + ".old")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object, or say that the file is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnreadableError(f"{file}: expected a file but there is none of that name") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{file}: is damaged ({error}); restore it from a copy, or train again") from None
    if not isinstance(content, dict):
        raise UnreadableError(f"{file}: expected a JSON object but got {type(content).__name__}")
    return content


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read tensors, or say that the file is damaged."""
    try:
        return load_file(file)
    except FileNotFoundError:
        raise UnreadableError(f"{file}: expected a file but there is none of that name") from None
    except SafetensorError as error:
        raise UnreadableError(f"{file}: is damaged ({error}); restore it from a copy, or train again") from None


def _write_json(file: Path, content: dict[str, Any]) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file aside and put it in place."""
    _write_json(_aside(file), content)
    _aside(file).replace(file)


def replace_text(file: Path, text: str) -> None:
    """Write a text aside and put it in place: a reader, or who was killed, finds the old one or the new one, whole."""
    _aside(file).write_text(text, encoding="utf-8", newline="\n")
    _aside(file).replace(file)


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:  # of a full disk, say
        raise OSError(f"{file}: cannot be written ({error}); make room, and go on with the same command") from None
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def write_state(folder: Path, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write what a run needs to go on."""
    _write_json(folder / STATE, numbers)
    _write_tensors(folder / TENSORS, tensors)


def _sync(folder: Path) -> None:
    """Make renames survive a power cut, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
