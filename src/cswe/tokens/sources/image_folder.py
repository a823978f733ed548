"""Any folder of class folders."""

import os
from pathlib import Path

import numpy as np

from cswe.tokens.labels import Labels
from cswe.tokens.randomness import stratified_split
from cswe.tokens.sources.base import SPLITS
from cswe.tokens.sources.images import EXTENSIONS, ImageSource

_SPLIT_FOLDERS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}


class ImageFolder(ImageSource):
    """A folder with one folder of images per class, or with such folders for ``train``, ``val`` and ``test``.

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
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        named = {folder for folder in folders if folder.lower() in _SPLIT_FOLDERS}
        self._split_is_given = bool(named) and named == set(folders)
        found: list[tuple[int, str, str]] = []
        for top in sorted(named) if self._split_is_given else [""]:
            for label in sorted(entry.name for entry in os.scandir(root / top) if entry.is_dir()):
                for member in _images(root / top / label):
                    relative = "/".join(part for part in (top, label, member) if part)
                    found.append((_SPLIT_FOLDERS.get(top.lower(), 0), label, relative))
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

    def options(self) -> dict[str, object]:
        """Return how the split was made."""
        if self._split_is_given:
            return {}
        return {"fractions": dict(zip(SPLITS[1:], self._fractions, strict=True)), "seed": self._seed}


def _images(folder: Path) -> list[str]:
    found = []
    for path, folders, files in os.walk(folder):
        folders.sort()
        inside = Path(path).relative_to(folder)
        found += [(inside / name).as_posix() for name in files if Path(name).suffix.lower() in EXTENSIONS]
    return sorted(found)
