"""Vectors on their way to a file, a block at a time: .npy, .parquet or .h5."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from cswe._extras import require
from cswe.training.errors import UserError

Block = npt.NDArray[np.float32]
SUFFIXES = (".npy", ".parquet", ".h5")
_BLOCK = 2**22  # bytes of a row group or chunk


class VectorWriter(Protocol):
    """A file that takes vectors and their ids; it appears under its name when it is whole."""

    def write(self, vectors: Block, ids: list[str]) -> None:
        """Append some rows."""

    def close(self) -> None:
        """Finish the file."""


def open_writer(file: Path, size: int) -> "AsideWriter":
    """Open a file for vectors of a given length; its suffix says what it becomes."""
    if file.suffix not in SUFFIXES:
        raise UserError(f"out: expected a name that ends in {', '.join(SUFFIXES)} but got {file.name!r}")
    return AsideWriter(file, size)


class AsideWriter:
    """Writes under another name, and puts the file in place when all went well."""

    def __init__(self, file: Path, size: int) -> None:
        self._file, self._size = file, size
        self._aside = file.with_name(f"{file.stem}.partial{file.suffix}")

    def __enter__(self) -> VectorWriter:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._writer = WRITERS[self._file.suffix](self._aside, self._size)
        return self._writer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        for aside, file in ((self._aside, self._file), (ids_file(self._aside), ids_file(self._file))):
            if kind is not None:
                aside.unlink(missing_ok=True)
            elif aside.exists():
                aside.replace(file)


def ids_file(file: Path) -> Path:
    """Name the text file with one id a line that goes with a .npy."""
    return file.with_suffix(".ids.txt")


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
        self._ids.writelines(name.replace("\n", " ") + "\n" for name in ids)
        self._rows += len(vectors)

    def close(self) -> None:
        """Fill in the number of rows."""
        self._stream.seek(0)
        self._header()
        self._stream.close()
        self._ids.close()


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
        self._flush()
        self._writer.close()


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
