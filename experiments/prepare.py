"""Choose shapes from ModelNet's HDF5 files and write them as one NPZ file, which is read without h5py.

The part of ModelNet40 at hand has 726 airplanes and one or two shapes of most classes. Official train and test shapes
are put together; classes with at least 8 shapes are kept, and at most 150 shapes of each.
"""

import argparse
from pathlib import Path

import numpy as np

from cswe.tokens.randomness import permutation
from cswe.tokens.sources.modelnet import ModelNet

LEAST, MOST, POINTS = 8, 150, 512


def main(arguments: list[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="python -m experiments.prepare", description=__doc__)
    parser.add_argument("--modelnet", type=Path, required=True, help="folder of the HDF5 files")
    parser.add_argument("--out", type=Path, required=True, help="the NPZ file to write")
    chosen = parser.parse_args(arguments)
    if chosen.out.suffix != ".npz":  # NumPy would add it, and what reads the file goes by its name
        parser.error(f"--out: expected a name that ends in .npz but got {chosen.out}")
    try:
        source = ModelNet(chosen.modelnet, points=POINTS)
    except ValueError as error:
        parser.error(str(error))
    assert source.labels.values is not None
    classes = source.labels.values.numpy()
    kept: list[int] = []
    names = []
    for label, name in enumerate(source.labels.spec.names):
        members = np.flatnonzero(classes == label)
        if len(members) >= LEAST:
            names.append(name)
            kept += sorted(members[permutation(len(members), "shapes", label)[:MOST]].tolist())
    labels = np.unique(classes[kept], return_inverse=True)[1]
    points = np.stack([source.load(index).points for index in kept])
    np.savez_compressed(chosen.out, points=points, labels=labels, ids=np.array([source.ids[index] for index in kept]))
    counts = ", ".join(f"{name} {count}" for name, count in zip(names, np.bincount(labels), strict=True))
    print(f"{chosen.out}: {len(kept)} shapes ({counts})")


if __name__ == "__main__":
    main()
