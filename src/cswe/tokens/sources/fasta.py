"""FASTA files, with labels in a table beside them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cswe.tokens.labels import LabelKind, Labels
from cswe.tokens.randomness import stratified_split
from cswe.tokens.sources.base import split_number
from cswe.tokens.sources.localization import SequenceSource
from cswe.tokens.sources.tables import open_text, read_table


class Fasta(SequenceSource):
    """Sequences of a FASTA file, known by the first word of their headers.

    Parameters
    ----------
    path
        The FASTA file, gzipped or not.
    labels
        A table with columns ``id``, ``label`` and, if wanted, ``split``, of one row a sequence. Sequences that it does
        not name are left out.
    label_kind
        ``"class"`` (names), ``"multilabel"`` (names joined by ``|``) or ``"real"`` (numbers joined by ``|``).
    fractions
        Shares of validation and test, when there is no column ``split``.
    seed
        Decides that split.
    """

    name = "fasta"

    def __init__(
        self,
        path: str | Path,
        labels: str | Path | None = None,
        *,
        label_kind: LabelKind = "class",
        fractions: tuple[float, float] = (0.1, 0.1),
        seed: int = 0,
    ) -> None:
        self._file = Path(path)
        records = dict(_unique(self._file))
        table = _read_labels(Path(labels)) if labels is not None else {}
        if labels is not None:
            ids = [name for name in records if name in table]
            if not ids:
                raise ValueError(f"{labels}: expected labels for the sequences of {path} but no id is in both")
        else:
            ids = list(records)
        self._options: dict[str, Any] = {"unlabelled_left_out": len(records) - len(ids)}
        values = _labels(ids, [table[name]["label"] for name in ids] if table else [], label_kind, labels)
        if table and all("split" in table[name] for name in ids):
            numbers = [split_number(table[name]["split"], f"{labels}, id {name!r}") for name in ids]
            splits = np.array(numbers, dtype=np.uint8)
        else:
            strata = np.zeros(len(ids), dtype=np.int64)
            if values.spec.kind == "class" and values.values is not None:
                strata = values.values.numpy()
            splits = stratified_split(strata, (1 - sum(fractions), *fractions), seed)
            self._options |= {"fractions": list(fractions), "seed": seed}
        super().__init__([records[name] for name in ids], ids, splits, values, origin=self._file)
        if len(ids) < len(records):
            self.left_out = f"{len(records) - len(ids):,} of {len(records):,} sequences, which {labels} does not name"
        if table and len(ids) < len(table):
            rows = f"{len(table) - len(ids):,} of {len(table):,} rows of {labels}, whose ids no sequence has"
            self.left_out = "; ".join(part for part in (self.left_out, rows) if part)

    def locate(self, index: int) -> str:
        """Say which record a sequence is."""
        return f"{self._file}, record {self.ids[index]}"

    def options(self) -> dict[str, Any]:
        """Return the choices made."""
        return self._options


def read_fasta(path: Path) -> Iterator[tuple[str, str]]:
    """Yield id and sequence of every record."""
    name, parts = None, list[str]()
    with open_text(path) as stream:
        for number, line in enumerate(stream, start=1):
            text = line.strip()
            if text.startswith(">"):
                if name is not None:
                    yield name, "".join(parts)
                words = text[1:].split()
                if not words:
                    raise ValueError(f"{path}, line {number}: expected an id after '>' but got none")
                name, parts = words[0], []
            elif text and not text.startswith(";"):
                if name is None:
                    raise ValueError(f"{path}, line {number}: expected a header, '>id …', but got {text[:30]!r}")
                parts.append("".join(text.split()))
    if name is not None:
        yield name, "".join(parts)


def _unique(path: Path) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for name, text in read_fasta(path):
        if name in seen:
            raise ValueError(f"{path}: expected every id once but {name!r} comes again")
        seen.add(name)
        yield name, text
    if not seen:
        raise ValueError(f"{path}: expected FASTA records but found none")


def _read_labels(path: Path) -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for line, row in read_table(path):
        entry = {name.strip().lower(): value.strip() for name, value in row.items()}
        if "id" not in entry or "label" not in entry:
            raise ValueError(f"{path}: expected columns 'id' and 'label' but got {sorted(entry)}")
        if entry["id"] in table:
            raise ValueError(f"{path}, line {line}: expected every id once but {entry['id']!r} comes again")
        table[entry["id"]] = entry
    return table


def _labels(names: list[str], texts: list[str], kind: LabelKind, file: str | Path | None) -> Labels:
    if not texts or kind == "none":
        return Labels()
    if kind != "multilabel" and "" in texts:
        raise ValueError(f"{file}: expected a label for every id but {names[texts.index('')]!r} has none")
    if kind == "class":
        return Labels.from_names(texts)
    parts = [[part.strip() for part in text.split("|") if part.strip()] for text in texts]
    if kind == "multilabel":
        return Labels.from_sets(parts)
    try:
        return Labels.real([[float(part) for part in entry] for entry in parts])
    except ValueError as error:
        raise ValueError(f"{file}: expected equally many finite numbers in every label ({error})") from None
