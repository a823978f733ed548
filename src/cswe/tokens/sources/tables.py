"""Text tables: CSV or TSV, plain or gzipped, read row by row."""

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO

# The largest table of a real data set is far below this; a gzip file that holds more is there to fill the disk.
MAX_BYTES = 8 * 2**30


# A protein has some 35,000 residues at most, but a text may be longer than the 131,072 letters that csv allows a field.
_MAX_FIELD = 2**30

# Stands after the last line: where a quoted field has no end, it lands in that field, which csv would pass over.
_END = "\0end of the table\0"


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a text file, unpacking gzip on the way; stop at a bomb, and name the file if it is no UTF-8."""
    if not path.is_file():
        raise ValueError(f"{path}: expected a file but there is none")
    raw = io.BufferedReader(_Limited(path)) if path.suffix == ".gz" else path.open("rb")
    with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as stream:
        try:
            yield stream
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected text in UTF-8 but {error}; save it as UTF-8") from None


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
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{self._path}: expected a whole gzip file but {error}; download it again") from None
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"{self._path}: unpacks to more than {MAX_BYTES} bytes; it is not to be trusted")
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def read_table(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a table: the line that each begins in, and its fields by column name.

    A tab in the first line makes it a TSV.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_FIELD))
    with open_text(path) as stream:
        first = stream.readline()
        if not first.strip():
            raise ValueError(f"{path}: expected a table with a line of column names but it is empty")
        delimiter = "\t" if "\t" in first else ","
        columns = next(csv.reader([first], delimiter=delimiter))
        counts = Counter(name.strip().lower() for name in columns)
        if repeated := [name for name, count in counts.items() if name and count > 1]:
            raise ValueError(f"{path}: expected every column name once but {repeated[0]!r} comes again")
        rows = csv.reader(chain(stream, [_END]), delimiter=delimiter)
        while True:
            line = rows.line_num + 2  # a field may hold line breaks, and the reader has not seen the first line
            try:
                fields = next(rows)
            except csv.Error as error:
                raise ValueError(f"{path}, line {line}: expected fields of a table but {error}") from None
            if fields == [_END]:
                return
            if fields and fields[-1].endswith(_END):
                raise ValueError(f"{path}, line {line}: expected a closing quotation mark but the file ends")
            if not fields:
                continue
            if len(fields) != len(columns):
                raise ValueError(f"{path}, line {line}: expected {len(columns)} fields but got {len(fields)}")
            yield line, dict(zip(columns, fields, strict=True))
