"""Where in the cell a protein works: the tables that are published, and any like them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cswe.tokens.errors import BadItemError
from cswe.tokens.labels import LabelKind, Labels
from cswe.tokens.sources.base import Source, split_number
from cswe.tokens.sources.tables import read_table

_TEXTS = ("sequence", "text")
_IDS = ("accession", "acc", "id", "name")
_TRUE = {"true", "1", "1.0", "yes"}
# The columns of DeepLoc 2.0's own file, one per location.
_DEEPLOC = (
    "Cytoplasm",
    "Nucleus",
    "Extracellular",
    "Cell membrane",
    "Mitochondrion",
    "Plastid",
    "Endoplasmic reticulum",
    "Lysosome/Vacuole",
    "Golgi apparatus",
    "Peroxisome",
)


class SequenceSource(Source):
    """Sequences of letters, held in memory: all of Swiss-Prot is 200 MB."""

    kind = "sequence"
    name = "sequences"

    def __init__(
        self, texts: Sequence[str], ids: Sequence[str], splits: Any, labels: Labels, *, origin: Path | None = None
    ) -> None:
        super().__init__(ids, splits, labels, origin=origin)
        self._texts = texts

    def stamp(self, index: int) -> bytes:
        """Return the sequence itself."""
        return self._texts[index].encode()

    def load(self, index: int) -> str:
        """Return one sequence."""
        if not self._texts[index].strip():
            raise BadItemError("is empty")
        return self._texts[index]


class Localization(SequenceSource):
    """A table of sequences with a label and a split for each; the column names say what it is.

    * ``sequence, target, set, validation``: the table of Zenodo 10631963 (``balanced.csv``).
    * ``sequence, label, partition``, several labels joined by ``|``: DeepLoc 2.0.
    * ``Sequence, Partition`` and a 0/1 column for every location: DeepLoc 2.0's own file.
    * ``text`` or ``sequence``, ``label``, ``split``: any other set. Without a column that names splits all items are
      for training; nothing is dealt, as it is for FASTA files.

    Parameters
    ----------
    path
        A CSV or TSV, gzipped or not.
    multi_label
        Keep every label of an item. Otherwise only items with exactly one label are kept.
    label_kind
        ``"class"`` or ``"multilabel"``, which is the same choice; ``"real"``: labels are numbers, several joined by
        ``|``, and items without any are left out; ``"none"``: the table needs no labels, and all items are kept.
    partitions
        Which homology partitions are for validation and for test, when the table has partitions; the rest is for
        training.
    """

    name = "localization"

    def __init__(
        self,
        path: str | Path,
        *,
        multi_label: bool = False,
        label_kind: LabelKind | None = None,
        partitions: tuple[tuple[int, ...], tuple[int, ...]] = ((3,), (4,)),
    ) -> None:
        self._file = Path(path)
        kind = label_kind or ("multilabel" if multi_label else "class")
        if multi_label and kind != "multilabel":
            raise ValueError(f"label_kind: expected 'multilabel', since multi_label was asked for, but got {kind!r}")
        texts, ids, splits = [], [], []
        targets: list[list[str]] = []
        self._lines: list[int] = []
        dropped = 0
        for number, (line, fields) in enumerate(read_table(self._file)):
            row = {name.strip().lower(): value for name, value in fields.items()}
            text = next((row[name] for name in _TEXTS if name in row), None)
            if text is None:
                raise ValueError(f"{path}: expected a column named one of {_TEXTS} but got {sorted(row)}")
            found = [] if kind == "none" else _targets(row, self._file)
            if (kind == "class" and len(found) != 1) or (kind == "real" and not found):
                dropped += 1
                continue
            texts.append(text.strip())
            ids.append(next((row[name] for name in _IDS if name in row), f"row-{number}"))
            splits.append(_split(row, partitions, self._file, line))
            targets.append(found)
            self._lines.append(line)
        if not texts:
            wanted = {"class": " with exactly one label", "real": " with a label"}.get(kind, "")
            raise ValueError(f"{path}: expected items{wanted} but got none")
        labels = _labels(targets, kind, self._lines, self._file)
        super().__init__(texts, ids, np.array(splits, dtype=np.uint8), labels, origin=self._file)
        if dropped:
            why = "do not have exactly one label; --multi-label keeps them" if kind == "class" else "have no label"
            self.left_out = f"{dropped:,} of {dropped + len(texts):,} items, which {why}"
        self._options: dict[str, Any] = {"multi_label": kind == "multilabel", "other_items_left_out": dropped}
        if kind in ("real", "none"):
            self._options["label_kind"] = kind
        if "partition" in row:
            self._options["partitions"] = [list(part) for part in partitions]

    def locate(self, index: int) -> str:
        """Say in which line a sequence stands."""
        return f"{self._file}, line {self._lines[index]} ({self.ids[index]})"

    def options(self) -> dict[str, Any]:
        """Return the choices made."""
        return self._options


def _targets(row: dict[str, str], file: Path) -> list[str]:
    for name in ("target", "label"):
        if name in row:
            return [part.strip() for part in row[name].split("|") if part.strip()]
    if all(name.lower() in row for name in _DEEPLOC):
        return [name for name in _DEEPLOC if row[name.lower()].lower() in _TRUE]
    raise ValueError(
        f"{file}: expected a column 'target' or 'label', or DeepLoc's locations, but got {sorted(row)}; "
        "--label-kind none takes the items without labels"
    )


def _labels(targets: list[list[str]], kind: LabelKind, lines: list[int], file: Path) -> Labels:
    if kind == "none":
        return Labels()
    if kind == "multilabel":
        return Labels.from_sets(targets)
    if kind == "class":
        return Labels.from_names([names[0] for names in targets])
    numbers: list[list[float]] = []
    for line, found in zip(lines, targets, strict=True):
        try:
            numbers.append([float(text) for text in found])
        except ValueError:
            raise ValueError(f"{file}, line {line}: expected numbers as label but got {'|'.join(found)!r}") from None
        if len(found) != len(targets[0]):
            raise ValueError(
                f"{file}, line {line}: expected {len(targets[0])} numbers as label, as in line {lines[0]}, but got "
                f"{len(found)}"
            )
    try:
        return Labels.real(numbers)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _split(row: dict[str, str], partitions: tuple[tuple[int, ...], tuple[int, ...]], file: Path, line: int) -> int:
    if "partition" in row:
        try:
            partition = int(float(row["partition"]))
        except (ValueError, OverflowError):
            raise ValueError(f"{file}, line {line}: expected a partition number but got {row['partition']!r}") from None
        return 1 if partition in partitions[0] else 2 if partition in partitions[1] else 0
    number = split_number(row.get("set", row.get("split", "train")), f"{file}, line {line}")
    return 1 if number == 0 and row.get("validation", "").strip().lower() in _TRUE else number
