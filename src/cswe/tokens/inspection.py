"""What is in a store, in words."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from cswe.tokens.store import TokenStore


def inspect_store(
    path: str | Path, *, check: bool = True, skip_bad: bool = False, sample: int = 1000
) -> dict[str, Any]:
    """Describe a store: counts, lengths, classes, layers, norms, checksums.

    Parameters
    ----------
    path
        The store's folder; one that is not finished will do.
    check
        Check every byte.
    skip_bad
        Leave damaged shards out.
    sample
        Measure the tokens of so many items, evenly spaced.
    """
    from cswe.tokens.manifest import Manifest

    if sample < 1:
        raise ValueError(f"sample: expected at least 1 but got {sample}")
    manifest = Manifest.read(Path(path))
    layers = sorted(manifest.spec.layers)
    store = TokenStore(path, layer=layers[0], partial=True, check=check, skip_bad=skip_bad)
    spec = store.spec
    report: dict[str, Any] = {
        "items": len(store),
        "tokens": int(store.lengths.sum()),
        "shards": len(manifest.shards),
        "complete": manifest.complete,
        "dtype": spec.dtype,
        "backbone": dict(spec.backbone),
        "preprocessing": dict(spec.preprocessing),
        "data": dict(spec.data),
        "cls": spec.cls,
        "weights": spec.weights,
        "splits": {name: len(store.split(name)) for name in spec.splits},
    }
    if len(store):
        marks = np.percentile(store.lengths, [0, 25, 50, 75, 100])
        report["lengths"] = dict(zip(("min", "25%", "50%", "75%", "max"), marks.tolist(), strict=True))
        report["labels"] = _labels(store)
        report["layers"] = [_layer(path, layer, sample, skip_bad) for layer in layers]
    if manifest.counts:
        report["counted"] = manifest.counts
    report["skipped"] = [dict(entry) for entry in manifest.skipped]
    report["dropped shards"] = [{"file": entry.file, "reason": entry.damage} for entry in manifest.dropped]
    report["damaged shards"] = [{"file": entry.file, "reason": reason} for entry, reason in store.damaged]
    report["checksums"] = "not checked" if not check else "all bytes are as they were written"
    if store.damaged:
        report["checksums"] = f"{len(store.damaged)} of {len(manifest.shards)} shards are damaged"
    return report


def _layer(path: str | Path, layer: int, sample: int, skip_bad: bool) -> dict[str, Any]:
    store = TokenStore(path, layer=layer, partial=True, skip_bad=skip_bad)
    measured = store.statistics(max_items=sample)
    return {
        "layer": layer,
        "dim": store.dim,
        "measured items": measured.items,
        "norm": {"mean": measured.norm_mean, "min": measured.norm_min, "max": measured.norm_max},
        "norm of the mean": float(measured.mean.norm()),
        "spread": measured.spread,
    }


def _labels(store: TokenStore) -> dict[str, Any]:
    labels, names = store.labels, store.label_names
    report: dict[str, Any] = {"kind": store.label_kind}
    if labels is None:
        return report
    if store.label_kind == "real":
        return report | {
            "mean": labels.mean(0).tolist(),
            "min": labels.amin(0).tolist(),
            "max": labels.amax(0).tolist(),
        }
    if store.label_kind == "class" and not names:
        # Only those that occur: numbers without names may be codes of any size.
        numbers, counts = labels.unique(return_counts=True)
        return report | {"classes": dict(zip(map(str, numbers.tolist()), counts.tolist(), strict=True))}
    counts = torch.bincount(labels, minlength=len(names)) if store.label_kind == "class" else labels.sum(0).long()
    texts = names or tuple(str(number) for number in range(len(counts)))
    return report | {"classes": dict(zip(texts, counts.tolist(), strict=True))}


def render(report: dict[str, Any]) -> str:
    """Lay a report out for reading."""
    lines: list[str] = []
    for name, value in report.items():
        if value in ({}, []):
            continue
        if name == "labels" and len(value.get("classes", ())) > 20:
            counts = list(value["classes"].values())
            value = {"kind": value["kind"], "classes": f"{len(counts)}, of {min(counts)} to {max(counts)} items"}
        lines += _lines(name, value, 0)
    return "\n".join(lines)


def _lines(name: str, value: Any, depth: int) -> list[str]:
    pad = "  " * depth
    if isinstance(value, dict):
        flat = ", ".join(f"{key} {_text(entry)}" for key, entry in value.items())
        if len(flat) < 90 and not any(isinstance(entry, dict | list) for entry in value.values()):
            return [f"{pad}{name}: {flat}"]
        return [f"{pad}{name}:", *(line for key, entry in value.items() for line in _lines(key, entry, depth + 1))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        shown = value[:20]
        more = [f"{pad}  … and {len(value) - 20} more"] if len(value) > 20 else []
        entries = [f"{pad}  " + ", ".join(f"{key} {_text(part)}" for key, part in entry.items()) for entry in shown]
        return [f"{pad}{name}: {len(value)}", *entries, *more]
    return [f"{pad}{name}: {_text(value)}"]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_text(entry)}" for key, entry in value.items()) + ")"
    return str(value)
