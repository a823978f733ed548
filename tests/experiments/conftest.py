"""What several of these tests need."""

import pytest
import torch

from cswe.tokens import Item, TokenStore
from cswe.training.provenance import commit
from experiments.worker import Worker


class Scored:
    """A result as a search sees it."""

    def __init__(self, cell, value):
        self.cell, self.error = cell, None
        self.scores = {"validation": {"top1": value}}


@pytest.fixture
def scored():
    """Make results as a search sees them, of a cell and a score."""
    return Scored


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    """Token sets of three classes, as the store ``proteins`` has them but small."""
    folder = tmp_path_factory.mktemp("stores")
    generator = torch.Generator().manual_seed(0)

    def items():
        for number in range(72):
            tokens = torch.randn(5 + number % 4, 4, generator=generator) + number % 3
            split = ("train", "train", "validation", "test")[number // 3 % 4]
            yield Item({6: tokens}, number % 3, f"{number}", split, cls={6: tokens[0]})

    for name in ("sets", "proteins"):
        TokenStore.create(folder / name, items(), classes=["a", "b", "c"])
    return folder


@pytest.fixture
def work(stores, tmp_path):
    """A worker of its own, told what to do."""

    def make(*studies, out="out", **options):
        told = []
        made = Worker(
            list(studies), stores, tmp_path / out, options.pop("known", []), options.pop("work", tmp_path / "work"),
            torch.device("cpu"), tell=told.append, **options,
        )  # fmt: skip
        return made, told

    return make


@pytest.fixture
def made_at(monkeypatch):
    """Let results from now on be of a commit."""

    def set_commit(name):
        monkeypatch.setenv("CSWE_COMMIT", name)
        commit.cache_clear()

    yield set_commit
    commit.cache_clear()
