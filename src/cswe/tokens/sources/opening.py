"""From a path to a data set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from cswe.tokens.labels import LabelKind
from cswe.tokens.sources.archives import open_zip
from cswe.tokens.sources.base import Source
from cswe.tokens.sources.digits import Digits, Ink
from cswe.tokens.sources.fasta import Fasta
from cswe.tokens.sources.image_folder import ImageFolder
from cswe.tokens.sources.localization import Localization
from cswe.tokens.sources.modelnet import ModelNet
from cswe.tokens.sources.point_sets import PointSets
from cswe.tokens.sources.tiny_imagenet import TinyImageNet

Format = Literal["digits", "tiny-imagenet", "image-folder", "modelnet", "point-sets", "localization", "fasta"]
_FASTA = (".fasta", ".fa", ".faa")
_TABLES = (".csv", ".tsv")
_POINTS = (".npz", ".h5", ".hdf5")


# Which choices matter to which format.
_USED: dict[str, set[str]] = {
    "digits": {"seed", "ink"},
    "tiny-imagenet": {"seed"},
    "image-folder": {"seed"},
    "modelnet": {"seed", "points"},
    "point-sets": {"seed", "points", "label_kind"},
    "localization": {
        "seed",
        "multi_label",
        "label_kind",
    },  # it draws nothing, but scripts give every format the same seed
    "fasta": {"seed", "labels", "label_kind"},
}


@dataclass(frozen=True)
class SourceOptions:
    """Choices about the data; each matters to the formats named.

    Parameters
    ----------
    seed
        Decides splits and drawn points.
    points
        Points drawn from a set. ModelNet: 512 unless said otherwise; point sets: all.
    ink
        Digits: what a pixel's intensity becomes, weight, coordinate or none.
    multi_label
        Localization: keep every label of an item rather than the items with one.
    labels
        FASTA: the table with the labels.
    label_kind
        FASTA, point sets and tables: class, multilabel, real or none.
    """

    seed: int = 0
    points: int | None = None
    ink: Ink = "weight"
    multi_label: bool = False
    labels: Path | None = None
    label_kind: LabelKind | None = None


def open_source(
    paths: str | Path | Sequence[str | Path] = (),
    format: Format | None = None,
    options: SourceOptions | None = None,
    *,
    strict: bool = False,
) -> Source:
    """Open a data set; without a path, the digits that come with scikit-learn.

    Parameters
    ----------
    paths
        A file or folder, or several zips of one data set.
    format
        What it is; found out from names and contents if not given.
    options
        Choices about the data.
    strict
        Refuse choices that do not matter to the format, rather than pass over them.

    Examples
    --------
    >>> len(open_source())
    1797
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    for file in files:
        if not file.exists():
            raise ValueError(f"{file}: expected a file or folder but there is none of that name")
    chosen = options or SourceOptions()
    kind = format or _sniff(files)
    if kind not in FORMATS:
        raise ValueError(f"format: expected one of {get_args(Format)} but got {kind!r}")
    if kind != "digits" and not files:
        raise ValueError(f"data: expected a path, since the format is {kind}, but got none")
    if kind == "digits" and files:
        raise ValueError(f"data: expected none, since the format is digits, but got {files[0]}")
    if kind != "tiny-imagenet" and len(files) > 1:
        raise ValueError(f"data: expected one path, since the format is {kind}, but got {len(files)}")
    if chosen.points is not None and chosen.points < 1:
        raise ValueError(f"points: expected at least 1 but got {chosen.points}")
    if strict:
        refuse_unused(chosen, _USED[kind], f"the format {kind}")
        if kind == "fasta" and chosen.labels is None:
            refuse_unused(chosen, _USED[kind] - {"label_kind"}, "the format fasta without labels")
    return FORMATS[kind](files, chosen)


def refuse_unused(options: Any, used: set[str], where: str) -> None:
    """Refuse options, fields of a dataclass, that are set to something and then not looked at."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in used and value != field.default:
            raise ValueError(
                f"{field.name}: expected it to be left out, since {where} has no use for it, but got {value}"
            )


FORMATS: dict[str, Callable[[list[Path], SourceOptions], Source]] = {
    "digits": lambda files, options: Digits(ink=options.ink, seed=options.seed),
    "tiny-imagenet": lambda files, options: TinyImageNet(files, seed=options.seed),
    "image-folder": lambda files, options: ImageFolder(files[0], seed=options.seed),
    "modelnet": lambda files, options: ModelNet(files[0], points=options.points or 512, seed=options.seed),
    "point-sets": lambda files, options: PointSets(
        files[0], points=options.points, label_kind=options.label_kind, seed=options.seed
    ),
    "localization": lambda files, options: Localization(
        files[0], multi_label=options.multi_label, label_kind=options.label_kind
    ),
    "fasta": lambda files, options: Fasta(
        files[0], options.labels, label_kind=options.label_kind or "class", seed=options.seed
    ),
}


def _sniff(files: list[Path]) -> Format:
    if not files:
        return "digits"
    first = files[0]
    suffix = Path(first.stem).suffix.lower() if first.suffix == ".gz" else first.suffix.lower()
    if first.is_dir():
        if (first / "wnids.txt").exists():
            return "tiny-imagenet"
        return "modelnet" if (first / "train_files.txt").exists() else "image-folder"
    if suffix == ".zip":
        with open_zip(first) as archive:
            if any("/images/" in name and name.lower().endswith(".jpeg") for name in archive.namelist()):
                return "tiny-imagenet"
        raise ValueError(f"{first}: expected Tiny ImageNet in a zip but found none of it; unpack other zips first")
    for format, suffixes in (("fasta", _FASTA), ("localization", _TABLES), ("point-sets", _POINTS)):
        if suffix in suffixes:
            return format  # type: ignore[return-value]
    known = ", ".join((".zip", *_FASTA, *_TABLES, *_POINTS))
    raise ValueError(
        f"{first}: cannot tell what this is, since it is no folder and does not end in {known}; say which with "
        f"--format, one of {get_args(Format)}, or make a store of what no format reads with TokenStore.create"
    )
