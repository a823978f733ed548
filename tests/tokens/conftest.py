"""Where the real data is, and small stores to try things on."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cswe.tokens import Item, Labels, TokenStore
from cswe.tokens.errors import BadItemError
from cswe.tokens.sources import Points, Source

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def assets() -> Path:
    folder = Path(os.environ.get("CSWE_ASSETS", ROOT.parent / "shared" / "assets"))
    if not folder.is_dir():
        pytest.skip("no real data and weights: set CSWE_ASSETS to the folder that holds them")
    return folder


@pytest.fixture(scope="session")
def make_items() -> Callable[..., list[Item]]:
    def make(count: int, *, dim: int = 4, seed: int = 0) -> list[Item]:
        generator = torch.Generator().manual_seed(seed)
        items = []
        for number in range(count):
            length = 1 + int(torch.randint(9, (), generator=generator))
            items.append(
                Item(
                    tokens=torch.randn(length, dim, generator=generator).half().float(),
                    label=number % 3,
                    id=f"item {number}",
                    split=("train", "train", "validation", "test")[number % 4],
                    cls=torch.full((dim,), float(number)),
                    weights=torch.rand(length, generator=generator),
                )
            )
        return items

    return make


@pytest.fixture
def items(make_items: Callable[..., list[Item]]) -> list[Item]:
    return make_items(50)


@pytest.fixture
def store(tmp_path: Path, items: list[Item]) -> TokenStore:
    return TokenStore.create(tmp_path / "store", items, classes=["a", "b", "c"], shard_bytes=300)


@pytest.fixture(scope="session")
def content() -> Callable[[Path], dict[str, bytes]]:
    def read(folder: Path) -> dict[str, bytes]:
        """Every file below a folder, by its relative name."""
        files = (path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    return read


@pytest.fixture(scope="session")
def damage() -> Callable[[TokenStore, int], None]:
    def flip_a_bit(store: TokenStore, number: int) -> None:
        """In the last byte of a shard: it opens as before, and only its checksum tells."""
        file = store.path / store.manifest.shards[number].file
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    return flip_a_bit


class SomePoints(Source):
    """Sets that are made when they are asked for; those in `bad` cannot be."""

    kind = "points"
    name = "some-points"

    def __init__(self, count: int, *, dim: int = 8, most: int = 20, bad: tuple[int, ...] = ()) -> None:
        splits = (np.arange(count) % 3).astype(np.uint8)
        super().__init__([f"set {i}" for i in range(count)], splits, Labels.classes(np.arange(count) % 5))
        self.dim = dim
        self._most = most
        self._bad = frozenset(bad)

    def load(self, index: int) -> Points:
        if index in self._bad:
            raise BadItemError("is bad on purpose")
        random = np.random.Generator(np.random.PCG64(index))
        return Points(random.standard_normal((1 + index % self._most, self.dim), dtype=np.float32))


@pytest.fixture(scope="session")
def some_points() -> type[SomePoints]:
    return SomePoints
