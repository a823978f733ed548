"""Any folder of class folders."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cswe.tokens.labels import Labels
from cswe.tokens.randomness import stratified_split
from cswe.tokens.sources.base import SPLIT_NAMES, SPLITS
from cswe.tokens.sources.images import EXTENSIONS, ImageSource


class ImageFolder(ImageSource):
    """A folder with one folder of images per class, or with such folders for ``train``, ``val`` and ``test``.

    Folders without images, and what systems and programs hide (``.ipynb_checkpoints``, ``__MACOSX``), are passed over.
    Folders may be links.

    Parameters
    ----------
    path
        The folder.
    fractions
        Shares of validation and test, dealt class by class, when the folder itself has no splits.
    seed
        Decides that split.
    """

    name = "image-folder"

    def __init__(self, path: str | Path, *, fractions: tuple[float, float] = (0.1, 0.1), seed: int = 0) -> None:
        root = Path(path)
        if not root.is_dir():
            raise ValueError(f"{root}: expected a folder of class folders but there is no such folder")
        tops = _split_folders(root)
        self._split_is_given = bool(tops)
        found: list[tuple[int, str, str]] = []
        for top in tops or [""]:
            for label in _folders(root / top):
                for member in _images(root / top / label):
                    relative = "/".join(part for part in (top, label, member) if part)
                    found.append((SPLIT_NAMES.get(top.lower(), 0), label, relative))
        if not found:
            raise ValueError(f"{root}: expected images in class folders but found none; is it class/image.jpg?")
        labels = Labels.from_names([label for _, label, _ in found])
        splits = np.array([split for split, _, _ in found], dtype=np.uint8)
        self._fractions, self._seed = fractions, seed
        if not self._split_is_given and labels.values is not None:
            shares = (1 - sum(fractions), *fractions)
            splits = stratified_split(labels.values.numpy(), shares, seed)
        ids = [relative for _, _, relative in found]
        super().__init__([root], [(0, member) for member in ids], ids, splits, labels)
        if others := sorted(set(_walk(root, of_images=False)).difference(ids)):
            self.left_out = (
                f"{len(others):,} files that are no images by their names, or in no class, {others[0]} for one"
            )

    def options(self) -> dict[str, object]:
        """Return how the split was made."""
        if self._split_is_given:
            return {}
        return {"fractions": dict(zip(SPLITS[1:], self._fractions, strict=True)), "seed": self._seed}


def _split_folders(root: Path) -> list[str]:
    """Return the folders that are splits: all that have images, or none."""
    folders = [name for name in _folders(root) if next(_walk(root / name), None) is not None]
    named = [name for name in folders if name.lower() in SPLIT_NAMES]
    others = [name for name in folders if name not in named]
    if not named or not others:
        return named
    # A train is also a vehicle: one such folder, with its images right in it, is a class like the others.
    if len(named) == 1 and any("/" not in member for member in _walk(root / named[0])):
        return []
    raise ValueError(
        f"{root}: expected folders of splits, or of classes, but got {named[0]!r} beside {others[0]!r}; move "
        f"{root / others[0]} elsewhere, or into a split; or, if {named[0]!r} is a class, put its images right into it"
    )


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not _is_hidden(entry.name))


def _images(folder: Path) -> list[str]:
    return sorted(_walk(folder))


def _walk(folder: Path, *, of_images: bool = True) -> Iterator[str]:
    real = folder.resolve()
    known = {real, *real.parents}  # a link to one of these leads round and round
    for path, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in sorted(folders) if not _is_hidden(name) and _leads_on(Path(path, name), known)]
        inside = Path(path).relative_to(folder)
        for name in files:
            if not _is_hidden(name) and (not of_images or Path(name).suffix.lower() in EXTENSIONS):
                yield (inside / name).as_posix()


def _leads_on(folder: Path, known: set[Path]) -> bool:
    """Say whether to go into a folder: not where it is a link to one of those known, which it then joins."""
    real = folder.resolve()
    if folder.is_symlink() and real in known:
        return False
    known.add(real)
    return True


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
