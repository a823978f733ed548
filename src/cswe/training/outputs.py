"""Vectors on their way to a file, a block at a time: .npy, .parquet or .h5."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from cswe._extras import require
from cswe.training.checkpoint import check_folder
from cswe.training.errors import UserError

Block = npt.NDArray[np.float32]
SUFFIXES = (".npy", ".parquet", ".h5")
# Whatever some reader takes for the end of a line: ids behind it would belong to other vectors.
_ONE_LINE = str.maketrans(dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))
_BLOCK = 2**22  # bytes of a row group or chunk


class VectorWriter(Protocol):
    """A file that takes vectors and their ids; it appears under its name when it is whole."""

    def write(self, vectors: Block, ids: list[str]) -> None:
        """Append some rows."""

    def close(self) -> None:
        """Finish the file."""


def check_out(file: Path, suffixes: Iterable[str]) -> None:
    """Raise an error if a file cannot be written under its name, before anything is computed for it."""
    if file.suffix not in suffixes:
        raise UserError(f"out: expected a name that ends in {', '.join(suffixes)} but got {file.name!r}")
    check_folder(file.parent)
    for place in _parts(file):
        if place.is_dir():
            raise UserError(f"out: expected a file to write but {place} is a folder; choose another name")


@contextmanager
def written_aside(file: Path) -> Iterator[Path]:
    """Lend another name to write under, and put the file in place when all went well; otherwise nothing is left of it.

    The ids that go with a .npy come along.
    """
    aside = file.with_name(f"{file.stem}.partial{file.suffix}")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield aside
        for part, place in zip(_parts(aside), _parts(file), strict=True):
            part.replace(place)
    finally:
        for part in _parts(aside):
            part.unlink(missing_ok=True)


@contextmanager
def open_writer(file: Path, size: int) -> Iterator[VectorWriter]:
    """Open a file for vectors of a given length; its suffix says what it becomes."""
    check_out(file, SUFFIXES)
    with written_aside(file) as aside, closing(WRITERS[file.suffix](aside, size)) as writer:
        yield writer


def ids_file(file: Path) -> Path:
    """Name the text file with one id a line that goes with a .npy."""
    return file.with_suffix(".ids.txt")


def _parts(file: Path) -> list[Path]:
    """List a file, and what goes with it."""
    return [file, ids_file(file)] if file.suffix == ".npy" else [file]


def _rows(size: int) -> int:
    return max(1, _BLOCK // (4 * size))


class NpyWriter:
    """A float32 array ``(n, size)``, and a text file with an id a line.

    NumPy leaves room in the header for the number of rows to grow, so it is filled in at the end; rows are plain
    writes, and nothing is held in memory.
    """

    def __init__(self, file: Path, size: int) -> None:
        self._size, self._rows = size, 0
        self._stream: IO[bytes] = file.open("wb")
        self._ids = ids_file(file).open("w", encoding="utf-8", newline="\n")
        self._header()

    def _header(self) -> None:
        shape = (self._rows, self._size)
        np.lib.format.write_array_header_1_0(
            self._stream, {"descr": np.dtype("<f4").str, "fortran_order": False, "shape": shape}
        )

    def write(self, vectors: Block, ids: list[str]) -> None:
        """Append some rows."""
        self._stream.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())
        self._ids.writelines(name.translate(_ONE_LINE) + "\n" for name in ids)
        self._rows += len(vectors)

    def close(self) -> None:
        """Fill in the number of rows."""
        with self._stream, self._ids:  # closed even if the disk is full
            self._stream.seek(0)
            self._header()


class ParquetWriter:
    """Columns ``id`` and ``vector`` (a list of fixed size), in row groups."""

    def __init__(self, file: Path, size: int) -> None:
        self._arrow = require("pyarrow", "data")
        parquet = require("pyarrow.parquet", "data")
        vector = self._arrow.list_(self._arrow.float32(), size)
        self._schema = self._arrow.schema([("id", self._arrow.string()), ("vector", vector)])
        self._writer: Any = parquet.ParquetWriter(str(file), self._schema)
        self._size, self._rows = size, _rows(size)
        self._waiting: list[tuple[Block, list[str]]] = []

    def write(self, vectors: Block, ids: list[str]) -> None:
        """Append some rows."""
        self._waiting.append((vectors, ids))
        if sum(len(names) for _, names in self._waiting) >= self._rows:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        flat = np.concatenate([vectors for vectors, _ in self._waiting]).reshape(-1)
        names = [name for _, part in self._waiting for name in part]
        vectors = self._arrow.FixedSizeListArray.from_arrays(self._arrow.array(flat), self._size)
        self._writer.write_table(
            self._arrow.Table.from_arrays([self._arrow.array(names), vectors], schema=self._schema)
        )
        self._waiting = []

    def close(self) -> None:
        """Write what is left."""
        with closing(self._writer):  # even if the disk is full
            self._flush()


class H5Writer:
    """Data sets ``vectors`` and ``ids``."""

    def __init__(self, file: Path, size: int) -> None:
        h5py = require("h5py", "data")
        self._file: Any = h5py.File(file, "w")
        rows = _rows(size)
        self._vectors = self._file.create_dataset(
            "vectors", (0, size), "f4", maxshape=(None, size), chunks=(rows, size)
        )
        self._ids = self._file.create_dataset("ids", (0,), h5py.string_dtype(), maxshape=(None,), chunks=(1024,))

    def write(self, vectors: Block, ids: list[str]) -> None:
        """Append some rows."""
        start, stop = len(self._vectors), len(self._vectors) + len(vectors)
        self._vectors.resize(stop, axis=0)
        self._ids.resize(stop, axis=0)
        self._vectors[start:stop] = vectors
        self._ids[start:stop] = ids

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


WRITERS: dict[str, Callable[[Path, int], VectorWriter]] = {
    ".npy": NpyWriter,
    ".parquet": ParquetWriter,
    ".h5": H5Writer,
}
