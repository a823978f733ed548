"""From data and backbones to token stores: ``python -m experiments.extract --assets ASSETS --stores STORES``."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import layer_norm

from cswe.tokens import Manifest, TokenStore
from cswe.tokens.backbones import open_backbone
from cswe.tokens.backbones.base import Backbone, Encoded
from cswe.tokens.backbones.opening import BackboneOptions
from cswe.tokens.extract import extract
from cswe.tokens.manifest import MANIFEST
from cswe.tokens.sources import Source, open_source
from cswe.tokens.sources.point_sets import PointSets
from cswe.training.errors import UserError
from cswe.training.locking import Lock
from cswe.training.parallel import default_device
from cswe.training.provenance import commit, machine, peak_memory, versions
from experiments.pools import NORMED, POINT_FRACTIONS, RAW, TOKENS
from experiments.records import RESULTS, add_extraction, add_known
from experiments.tuning import LAYERS, SPLITS

_TRIES = 20  # who only looks whether a store is being made holds its lock for a moment


@dataclass(frozen=True)
class Recorded:
    """A store to make: where its items come from, which backbone sees them, and which layers are kept.

    With `normed`, the tokens are there a second time, each with mean 0 and deviation 1.
    """

    source: Callable[[Path], Source]
    backbone: str
    layers: tuple[int, ...] = ()
    normed: bool = False


class NormedToo(Backbone):
    """A backbone for points whose last layer is given twice: as it is, and with every token normalised.

    Some tokens of the Point Cloud Transformer are a hundred times as long as others, since no norm follows its last
    layer, as it does in DeiT and ESM.
    """

    kind = "points"

    def __init__(self, backbone: Backbone) -> None:
        self._backbone, self.preparer, self.device = backbone, backbone.preparer, backbone.device
        self.layers = {TOKENS: backbone.layers[TOKENS], NORMED: backbone.layers[TOKENS]}

    def encode(self, units: Sequence[Any], dtype: str) -> Encoded:
        """Encode sets of points."""
        encoded = self._backbone.encode(units, dtype)
        pieces = [layer_norm(piece.float(), piece.shape[-1:]).to(piece.dtype) for piece in encoded.tokens[TOKENS]]
        return replace(encoded, tokens={TOKENS: encoded.tokens[TOKENS], NORMED: pieces})

    def describe(self) -> dict[str, Any]:
        """Return the manifest's notes."""
        return {**self._backbone.describe(), f"layer {NORMED}": f"layer {TOKENS}, each token normalised"}


def _images(assets: Path) -> Source:
    zips = sorted(assets.glob("tiny-imagenet-200*.zip"))
    if not zips:
        raise ValueError(f"{assets}: expected tiny-imagenet-200*.zip but there is none; see experiments/README.md")
    return open_source(zips, "tiny-imagenet")


def _proteins(assets: Path) -> Source:
    return open_source(assets / "deeploc2_swissprot_5fold.csv.gz", "localization")


def _shapes(seed: int) -> Callable[[Path], Source]:
    def shapes(assets: Path) -> Source:
        file = assets / "modelnet-part.npz"
        if not file.exists():
            raise ValueError(f"{file}: there is none; make it with python -m experiments.prepare")
        return PointSets(file, fractions=POINT_FRACTIONS, seed=seed)

    return shapes


_PCT = "pct_modelnet40_backbone.safetensors"
STORES = {
    "proteins": Recorded(_proteins, "esm2_t6_8M_hemolysis"),
    "images": Recorded(_images, "deit-tiny-patch16-224", LAYERS),
    **{
        f"points-{seed}": Recorded(_shapes(seed), "pct_modelnet40_backbone.safetensors", normed=True)
        for seed in range(SPLITS[NORMED])
    },
    **{f"raw-{seed}": Recorded(_shapes(seed), "identity") for seed in range(SPLITS[RAW])},
}


def main(arguments: list[str] | None = None) -> None:
    """Make the stores that are not there yet, and note how long each took."""
    parser = argparse.ArgumentParser(prog="python -m experiments.extract", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="STORE", help=f"some of {', '.join(STORES)}; all if none is named")
    parser.add_argument("--assets", type=Path, required=True, help="folder with the data and the weights")
    parser.add_argument("--stores", type=Path, required=True, help="folder for the stores")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the times are noted")
    add_known(parser, "times")
    parser.add_argument("--device", help="cpu or cuda; a GPU if there is one")
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.names if name not in STORES]:
        parser.error(f"expected some of {', '.join(STORES)} but got {unknown[0]}")
    try:
        device = default_device(chosen.device)
    except UserError as error:
        parser.error(str(error))
    # All at once: who needs the last store should not give up while the first is being made.
    claims = {name: _claim(chosen.stores, name) for name in chosen.names or STORES}
    try:
        for name, claim in claims.items():
            if claim is None:
                print(f"{name}: another process is making it", flush=True)
            elif _is_there(chosen.stores / name):
                print(f"{name}: is there already", flush=True)
            else:
                try:
                    _make_and_note(name, chosen.assets, chosen.stores, device, chosen.out, chosen.known)
                except (ValueError, OSError) as error:
                    raise SystemExit(f"{name}: {error}") from None
            if claim is not None:
                claim.release(remove=True)
    finally:
        for claim in claims.values():
            if claim is not None:
                claim.release()


def _make_and_note(name: str, assets: Path, stores: Path, device: torch.device, out: Path, known: list[Path]) -> None:
    started = time.monotonic()
    store = _make(STORES[name], assets, stores / name, device)
    seconds = time.monotonic() - started
    entry = {
        "store": name,
        "seconds": seconds,
        "items": len(store),
        "tokens": int(store.lengths.sum()),
        "layers": list(store.layers),
        "key": store.spec.key,
        "memory": peak_memory(device),
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
    }
    add_extraction(out, entry, known, stores / "extraction.lock")
    print(f"{name}: {len(store):,} items in {seconds:.0f} s", flush=True)


def is_being_made(stores: Path, name: str) -> bool:
    """Say whether an extraction is making a store, or will when it is through with others."""
    lock = _lock(stores, name)
    if not lock.file.exists():
        return False
    if lock.take():
        lock.release(remove=True)
        return False
    return True


def _claim(stores: Path, name: str) -> Lock | None:
    """Take a store to make; None if another process has it."""
    lock = _lock(stores, name)
    for _ in range(_TRIES):
        if lock.take():
            return lock
        time.sleep(0.05)
    return None


def _lock(stores: Path, name: str) -> Lock:
    return Lock(stores / f"{name}.lock")


def _is_there(store: Path) -> bool:
    return (store / MANIFEST).exists() and Manifest.read(store).complete


def _make(recorded: Recorded, assets: Path, out: Path, device: torch.device) -> TokenStore:
    source = recorded.source(assets)
    name = recorded.backbone if recorded.backbone == "identity" else str(assets / recorded.backbone)
    backbone = open_backbone(name, source, BackboneOptions(layers=recorded.layers, device=str(device)))
    if recorded.normed:
        backbone = NormedToo(backbone)
    return extract(source, backbone, out, resume=True, progress=False)


if __name__ == "__main__":
    main()
