"""Small comparisons to write up, and a browser to look at what was written."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from cswe.cli import main
from cswe.tokens import Item, TokenStore
from cswe.training.cells import Plan
from cswe.training.compare import compare

# Tests are no package, so that a module beside them is loaded by its place.
_spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
chromium = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(chromium)

TINY = ("batch_size=64", "points=8", "bound_batches=2")


@pytest.fixture(autouse=True, scope="session")
def _plain_torch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSWE_BACKEND", "scan")
        yield


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    pytest.importorskip("sklearn", reason="needs the extra 'data'")
    folder = tmp_path_factory.mktemp("digits") / "store"
    assert main(["extract", "--out", str(folder), "--limit", "240", "--quiet"]) == 0
    return folder


@pytest.fixture(scope="session")
def study(digits, tmp_path_factory):
    """Two numbers of slices, two bounds, two seeds."""
    folder = tmp_path_factory.mktemp("study") / "study"
    pools = ("mean", "attention:queries=4", "swe", "cswe:bound=0.9", "cswe:bound=0.8")
    plan = Plan(pools, (4, 16), seeds=2, choices=(*TINY, "epochs=2", "wrt=both", "dual_lr=0.1"))
    compare(digits, folder, plan, baseline="swe", device="cpu")
    return folder


@pytest.fixture(scope="session")
def layered(tmp_path_factory):
    """A comparison on tokens of two layers, with long names of classes."""
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path_factory.mktemp("layers")
    items = [
        Item(
            {layer: torch.randn(6, 4, generator=generator) + number % 3 for layer in (6, 12)},
            number % 3,
            f"item {number}",
            ("train", "train", "validation", "test")[number % 4],
        )
        for number in range(96)
    ]
    names = ["endoplasmic reticulum", "cytoplasm", "<b>nucleus</b> & more"]
    TokenStore.create(folder / "store", items, classes=names)
    plan = Plan(("mean", "swe"), (4,), seeds=2, choices=(*TINY, "epochs=2"))
    compare(folder / "store", folder / "study", plan, device="cpu")
    return folder / "study"


@pytest.fixture(scope="session")
def browser():
    if chromium.find() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("there is no Chromium: .ci/run installs it")
        pytest.skip("needs Chromium")
    opened = chromium.Browser()
    yield opened
    opened.close()
