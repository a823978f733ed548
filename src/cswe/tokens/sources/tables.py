"""Text tables: CSV or TSV, plain or gzipped, read row by row."""

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

# The largest table of a real data set is far below this; a gzip file that holds more is there to fill the disk.
MAX_BYTES = 8 * 2**30


def open_text(path: Path) -> IO[str]:
    """Open a text file, unpacking gzip on the way; stop at a bomb."""
    if not path.is_file():
        raise ValueError(f"{path}: expected a file but there is none")
    if path.suffix == ".gz":
        return io.TextIOWrapper(io.BufferedReader(_Limited(path)), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


class _Limited(io.RawIOBase):
    """A gzip file that refuses to unpack to more than `MAX_BYTES`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = gzip.open(path)  # noqa: SIM115 - closed in close()
        self._left = MAX_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        try:
            data = self._file.read(len(view))
        except (OSError, EOFError) as error:
            raise ValueError(f"{self._path}: expected a whole gzip file but {error}; download it again") from None
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"{self._path}: unpacks to more than {MAX_BYTES} bytes; it is not to be trusted")
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def read_table(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a table, by column name; a tab in the first line makes it a TSV."""
    with open_text(path) as stream:
        first = stream.readline()
        if not first.strip():
            raise ValueError(f"{path}: expected a table with a line of column names but it is empty")
        delimiter = "\t" if "\t" in first else ","
        columns = next(csv.reader([first], delimiter=delimiter))
        for number, fields in enumerate(csv.reader(stream, delimiter=delimiter), start=2):
            if not fields:
                continue
            if len(fields) != len(columns):
                raise ValueError(f"{path}, line {number}: expected {len(columns)} fields but got {len(fields)}")
            yield dict(zip(columns, fields, strict=True))
