"""ModelNet40 in the HDF5 files that PointNet made the standard."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from cswe._extras import require
from cswe.tokens.errors import BadItemError
from cswe.tokens.labels import Labels
from cswe.tokens.randomness import permutation, stratified_split
from cswe.tokens.sources.base import Points, Source


class ModelNet(Source):
    """ModelNet40 (``modelnet40_ply_hdf5_2048``): 2,048 points a shape, of which some are drawn.

    Parameters
    ----------
    path
        The folder, with ``train_files.txt``, ``test_files.txt``, ``shape_names.txt`` and the HDF5 files.
    points
        Points drawn from a shape, without repetition; which ones depends on `seed` and on the shape alone.
    validation
        Share of the training shapes, class by class, that is kept for validation.
    seed
        Decides points and split.
    """

    kind = "points"
    name = "modelnet40"
    licence = "academic use"
    dim = 3

    def __init__(self, path: str | Path, *, points: int = 512, validation: float = 0.1, seed: int = 0) -> None:
        h5py = require("h5py", "data")
        root = Path(path)
        for name in ("train_files.txt", "test_files.txt"):
            if not (root / name).exists():
                raise ValueError(f"{root}: expected ModelNet40's HDF5 folder but there is no {name} in it")
        self._files: list[Path] = []
        self._places: list[tuple[int, int]] = []
        ids, targets, official = [], [], []
        for part in ("train", "test"):
            for line in (root / f"{part}_files.txt").read_text().split():
                # The list names files as they lay on its authors' machine; only the name itself means anything here.
                file = root / Path(line).name
                if not file.exists():
                    raise ValueError(f"{file}: is missing, though {part}_files.txt names it; download it again")
                with _open(h5py, file) as content:
                    if "data" not in content or "label" not in content:
                        raise ValueError(f"{file}: expected the arrays data and label but got {sorted(content)}")
                    labels = np.asarray(content["label"]).reshape(-1)
                    shape = tuple(content["data"].shape)
                    if len(shape) != 3 or shape[::2] != (len(labels), self.dim) or shape[1] < points:
                        raise ValueError(f"{file}: expected ({len(labels)}, ≥ {points}, 3) points but got {shape}")
                self._places += [(len(self._files), row) for row in range(len(labels))]
                self._files.append(file)
                ids += [f"{file.stem}/{row}" for row in range(len(labels))]
                targets += labels.tolist()
                official += [part] * len(labels)
        names = (root / "shape_names.txt").read_text().split() if (root / "shape_names.txt").exists() else []
        classes = np.array(targets, dtype=np.int64)
        splits = np.full(len(ids), 2, dtype=np.uint8)
        train = np.array([part == "train" for part in official])
        splits[train] = stratified_split(classes[train], (1 - validation, validation), seed)
        super().__init__(ids, splits, Labels.classes(classes, names), origin=root)
        self._points, self._validation, self._seed = points, validation, seed
        self._open: dict[int, Any] = {}
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def load(self, index: int) -> Points:
        """Return the points drawn from a shape."""
        number, row = self._places[index]
        if self._process != os.getpid():  # forked: HDF5 handles cannot be shared
            self._open, self._process = {}, os.getpid()
        if number not in self._open:
            self._open[number] = _open(require("h5py", "data"), self._files[number])
        try:
            shape = np.asarray(self._open[number]["data"][row], dtype=np.float32)
        except OSError:
            raise BadItemError("cannot be read from its HDF5 file") from None
        chosen = permutation(len(shape), "points", self._seed, self.ids[index])[: self._points]
        return Points(shape[chosen])

    def locate(self, index: int) -> str:
        """Say in which file and row a shape lies."""
        number, row = self._places[index]
        return f"{self._files[number]}, shape {row}"

    def options(self) -> dict[str, Any]:
        """Return the choices made."""
        return {"points": self._points, "validation": self._validation, "seed": self._seed}


def _open(h5py: Any, file: Path) -> Any:
    try:
        return h5py.File(file, "r")
    except OSError as error:
        raise ValueError(f"{file}: expected an HDF5 file but it cannot be read ({error}); download it again") from None
