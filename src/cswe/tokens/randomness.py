"""Random orders that are the same for ever: on every machine, with every version of every library."""

import hashlib

import numpy as np
import numpy.typing as npt


def random_keys(count: int, *key: int | str) -> npt.NDArray[np.uint64]:
    """Return `count` random integers that are a function of `key` alone.

    Raw Philox output is used because NumPy guarantees its stream across versions, which it does not for
    ``Generator.permutation`` and the like.

    Examples
    --------
    >>> random_keys(2, "a", 1).tolist() == random_keys(2, "a", 1).tolist()
    True
    """
    digest = hashlib.sha256("\0".join(map(str, key)).encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)
    return np.asarray(raw, dtype=np.uint64)


def permutation(count: int, *key: int | str) -> npt.NDArray[np.int64]:
    """Return the permutation of ``range(count)`` that belongs to `key`.

    Examples
    --------
    >>> sorted(permutation(5, "shuffle", 0).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(random_keys(count, *key), kind="stable").astype(np.int64)


def stratified_split(classes: npt.NDArray[np.int64], fractions: tuple[float, ...], seed: int) -> npt.NDArray[np.uint8]:
    """Deal items into parts, class by class, in the proportions of `fractions`.

    Parameters
    ----------
    classes
        The class of every item, shape ``(n,)``.
    fractions
        One share a part; the first part also takes what rounding leaves over.
    seed
        Another seed, another split.

    Returns
    -------
    numpy.ndarray
        The part of every item, ``uint8`` of shape ``(n,)``.

    Examples
    --------
    >>> parts = stratified_split(np.repeat([0, 1], 10), (0.8, 0.2), seed=0)
    >>> parts[:10].sum(), parts[10:].sum()
    (np.uint64(2), np.uint64(2))
    """
    parts = np.zeros(len(classes), dtype=np.uint8)
    for label in np.unique(classes):
        members = np.flatnonzero(classes == label)
        shuffled = members[permutation(len(members), "split", seed, int(label))]
        start = 0
        for part in range(1, len(fractions)):
            stop = start + round(len(members) * fractions[part])
            parts[shuffled[start:stop]] = part
            start = stop
    return parts
