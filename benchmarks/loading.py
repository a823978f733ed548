"""Where the time of a training step goes: to the tokens' way to the device, or to the pooling.

Writes a store of random tokens (the shape of DeiT-Tiny's by default), then times, batch by batch, every way in which
batches reach the device, and the training step of a sliced Wasserstein pooling with L = 16 slices that uses them.

    python benchmarks/loading.py --device cuda --items 20000
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from cswe.nn import SWEPool
from cswe.tokens import Batch, Item, TokenStore


def make_store(folder: Path, items: int, tokens: int, dim: int, ragged: bool) -> TokenStore:
    generator = torch.Generator().manual_seed(0)

    def made() -> Iterator[Item]:
        for number in range(items):
            length = tokens if not ragged else int(torch.randint(tokens // 4, tokens + 1, (), generator=generator))
            yield Item(torch.randn(length, dim, generator=generator), label=number % 200)

    return TokenStore.create(folder, made())


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--items", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=196)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--ragged", action="store_true", help="sets of a quarter to all of --tokens")
    parser.add_argument("--folder", type=Path, help="where the store is written; a temporary folder by default")
    options = parser.parse_args()
    device = torch.device(options.device)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        store = make_store(folder / "store", options.items, options.tokens, options.dim, options.ragged)
        print(f"{store}, {store.lengths.sum() * store.dim * 2 / 2**20:.0f} MiB, batch {options.batch}, {device}")
        torch.manual_seed(0)
        pool = SWEPool(options.dim, options.slices, options.tokens, readout="flatten").to(device)
        head = nn.Linear(pool.out_dim, 200).to(device)
        optimizer = torch.optim.Adam([*pool.parameters(), *head.parameters()])

        def step(batch: Batch) -> Tensor:
            loss = nn.functional.cross_entropy(head(pool(batch.tokens, batch.mask)), batch.labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        ways = [("resident", True), ("pinned prefetch" if device.type == "cuda" else "memory-mapped", False)]
        for name, resident in ways:
            began = clock(device)
            batches = store.batches(options.batch, device=device, resident=resident, drop_last=True)
            ready = clock(device) - began
            for batch in batches:
                step(batch)  # warm up: compilation, page cache, allocator
            began = clock(device)
            count = sum(1 for _ in batches)
            loading = (clock(device) - began) / count
            batches.dtype = None
            began = clock(device)
            count = sum(1 for _ in batches)
            stored = (clock(device) - began) / count
            batches.dtype = torch.float32
            began = clock(device)
            for batch in batches:
                step(batch)
            both = (clock(device) - began) / count
            held = next(iter(batches))
            began = clock(device)
            for _ in range(count):
                step(held)
            alone = (clock(device) - began) / count
            print(
                f"{name:>16}: ready in {ready:.2f} s; a batch {1e3 * loading:.2f} ms, of which "
                f"{1e3 * stored:.2f} gather it and the rest makes it float32; the step on a batch at hand "
                f"{1e3 * alone:.2f} ms; both {1e3 * both:.2f} ms, so loading adds {100 * (both / alone - 1):.0f} %"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
