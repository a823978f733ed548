"""Which tokens a result was computed on: what a store holds, wherever it lies."""

from collections.abc import Mapping
from typing import Any

from cswe.tokens import Manifest
from cswe.tokens.manifest import digest


def origin_of(manifest: Manifest) -> dict[str, Any]:
    """Return what a result notes of its store; the same for a copy of it, and for another extraction of the same data.

    Examples
    --------
    >>> from cswe.tokens import StoreSpec
    >>> sorted(origin_of(Manifest(StoreSpec({0: 3}))))
    ['content', 'items', 'key']
    """
    content = digest([shard.sha256 for shard in manifest.shards])[:32]
    return {"key": manifest.spec.key, "items": manifest.items, "content": content}


def noted_origin(noted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was noted of a store; runs and searches made by earlier versions have its key alone."""
    older = {"key": noted["tokens"]} if "tokens" in noted else {}
    found: dict[str, Any] = noted.get("store", older)
    return found


def same_origin(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether two results may have been computed on the same tokens, by all that is known of both.

    Examples
    --------
    >>> same_origin({"key": "a", "content": "b"}, {"key": "a"}), same_origin({"content": "b"}, {"content": "c"})
    (True, False)
    """
    return all(one[name] == other[name] for name in one.keys() & other.keys())
