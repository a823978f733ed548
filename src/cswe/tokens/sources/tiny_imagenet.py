"""Tiny ImageNet, as it is distributed: a folder, a zip, or several zips with its layout."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cswe.tokens.labels import Labels
from cswe.tokens.randomness import stratified_split
from cswe.tokens.sources.archives import FilePool, open_zip, safe_members
from cswe.tokens.sources.images import ImageSource

_TRAIN = re.compile(r"train/(n\d+)/images/(n\d+_(\d+)\.JPEG)$")
_VAL = re.compile(r"val/images/(val_(\d+)\.JPEG)$")


class TinyImageNet(ImageSource):
    """Tiny ImageNet: 200 classes of 64 × 64 images.

    The test split of the challenge has no labels, so that, as is usual, its ``val`` is the test set here and a
    part of its ``train``, chosen class by class, is for validation.

    Parameters
    ----------
    paths
        The folder ``tiny-imagenet-200``, the official zip, or several zips that together have its layout.
    validation
        Share of the training images that is kept for validation.
    seed
        Decides which.
    """

    name = "tiny-imagenet"
    licence = "ImageNet terms: non-commercial research"

    def __init__(self, paths: str | Path | Sequence[str | Path], *, validation: float = 0.1, seed: int = 0) -> None:
        containers = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        train: list[tuple[str, int, int, str]] = []
        held_out: list[tuple[int, int, str]] = []
        annotations: dict[str, str] = {}
        pool = FilePool()
        for number, container in enumerate(containers):
            for member in _list(container):
                if match := _TRAIN.search(member):
                    train.append((match[1], int(match[3]), number, member))
                elif match := _VAL.search(member):
                    held_out.append((int(match[2]), number, member))
                elif member.endswith("val/val_annotations.txt"):
                    annotations |= _annotations(pool, container, member)
        where = ", ".join(str(container) for container in containers)
        if not train and not held_out:
            raise ValueError(f"{where}: expected Tiny ImageNet (train/n…/images/…, val/images/…) but found none of it")
        train.sort()
        held_out.sort()
        unknown = [member for _, _, member in held_out if Path(member).name not in annotations]
        if unknown:
            raise ValueError(
                f"{where}: expected val/val_annotations.txt to name every image of val but it lacks {unknown[0]}; "
                "give all parts of the data set"
            )
        untrained = {annotations[Path(member).name] for *_, member in held_out} - {wnid for wnid, *_ in train}
        if train and untrained:
            raise ValueError(
                f"{where}: expected images in train of every class of val but there are none of {min(untrained)}, nor "
                f"of {len(untrained) - 1} others; give all parts of the data set"
            )
        wnids = [wnid for wnid, *_ in train] + [annotations[Path(member).name] for *_, member in held_out]
        labels = Labels.from_names(wnids)
        splits = np.full(len(wnids), 2, dtype=np.uint8)
        if train and labels.values is not None:
            classes = labels.values.numpy()[: len(train)]
            splits[: len(train)] = stratified_split(classes, (1 - validation, validation), seed)
        places = [(number, member) for _, _, number, member in train] + [
            (number, member) for _, number, member in held_out
        ]
        # From the last train/ or val/ on: the same name from a folder and from a zip, whatever lies around it there.
        ids = [re.sub(r"^.*((?:train|val)/)", r"\1", member) for _, member in places]
        self._validation, self._seed = validation, seed
        super().__init__(containers, places, ids, splits, labels)

    def options(self) -> dict[str, object]:
        """Return how the split was made."""
        return {"validation": self._validation, "seed": self._seed}


def _annotations(pool: FilePool, container: Path, member: str) -> dict[str, str]:
    """Read the class of every image of val."""
    try:
        text = pool.read(container, member).decode()
    except ValueError as error:
        raise ValueError(f"{container / member}: {error}") from None
    classes = {}
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) > 1:
            classes[fields[0]] = fields[1]
        elif line.strip():
            raise ValueError(
                f"{container / member}, line {number}: expected an image and its class, a tab between them, but got "
                f"{line!r}"
            )
    return classes


def _list(container: Path) -> list[str]:
    if container.is_dir():
        return sorted(path.relative_to(container).as_posix() for path in container.rglob("*") if path.is_file())
    if not container.exists():
        raise ValueError(f"{container}: expected a folder or a zip but there is no such file")
    with open_zip(container) as archive:
        return [member.filename for member in safe_members(archive)]
