"""Where the real data is, and small stores to try things on."""

import os
from pathlib import Path

import pytest
import torch

from cswe.tokens import Item, TokenStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def assets() -> Path:
    folder = Path(os.environ.get("CSWE_ASSETS", ROOT.parent / "shared" / "assets"))
    if not folder.is_dir():
        pytest.skip("no real data and weights: set CSWE_ASSETS to the folder that holds them")
    return folder


def make_items(count: int, *, dim: int = 4, seed: int = 0) -> list[Item]:
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


@pytest.fixture
def items() -> list[Item]:
    return make_items(50)


@pytest.fixture
def store(tmp_path: Path, items: list[Item]) -> TokenStore:
    return TokenStore.create(tmp_path / "store", items, classes=["a", "b", "c"], shard_bytes=300)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
