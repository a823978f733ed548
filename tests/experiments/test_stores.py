"""The stores of the experiments: waited for while somebody makes them, made once, and noted."""

import time

import pytest
import torch

from cswe.tokens import TokenStore
from cswe.tokens.backbones.base import Backbone, Encoded
from cswe.training.locking import Lock
from experiments import worker as worker_module
from experiments.extract import NormedToo
from experiments.extract import main as extract
from experiments.records import RESULTS, add_extraction, read_extractions
from tests.experiments.small import study


def test_a_store_that_is_not_there_is_waited_for_until_time_is_up(work):
    worker, told = work(study(store="missing"), until=time.monotonic() + 0.1)
    started = time.monotonic()
    assert worker.run() == 0
    assert time.monotonic() - started < 5
    assert all("waiting for" in line and "missing" in line for line in told)


def test_a_store_that_nobody_makes_is_not_waited_for(work, stores, monkeypatch):
    monkeypatch.setattr(worker_module, "_GRACE", 0.0)
    worker, told = work(study("there", pools=("mean",)), study("other", store="missing"))
    assert worker.run() == 2
    assert worker.failed == ["missing"]
    assert told[-1].endswith("and nobody makes it: python -m experiments.extract missing")
    assert not (stores / "missing.lock").exists()


def test_a_store_that_is_being_made_is_waited_for(work, stores, monkeypatch):
    monkeypatch.setattr(worker_module, "_GRACE", 0.0)
    lock = Lock(stores / "missing.lock")
    assert lock.take()
    looks = iter(range(3))

    def look(_):
        if next(looks) == 1:
            lock.release(remove=True)  # that extraction was killed

    monkeypatch.setattr(worker_module.time, "sleep", look)
    worker, told = work(study(store="missing"))
    assert worker.run() == 0
    assert [("waiting for" in line, "nobody makes it" in line) for line in told] == [(True, False), (False, True)]
    assert next(looks) == 2


def test_an_extraction_is_noted_once(tmp_path, capsys):
    numpy = pytest.importorskip("numpy")
    rng = numpy.random.default_rng(0)
    points = rng.normal(size=(40, 8, 3)).astype("float32")
    numpy.savez(tmp_path / "modelnet-part.npz", points=points, labels=numpy.arange(40) % 2)
    words = ["raw-1", "--assets", str(tmp_path), "--stores", str(tmp_path / "stores"), "--out", str(tmp_path / "out")]
    claimed = Lock(tmp_path / "stores" / "raw-1.lock")
    assert claimed.take()
    extract([*words, "--device", "cpu"])
    assert "another process is making it" in capsys.readouterr().out
    claimed.release()
    extract([*words, "--device", "cpu"])
    extract([*words, "--device", "cpu"])
    assert "is there already" in capsys.readouterr().out
    assert not list((tmp_path / "stores").glob("raw*.lock"))
    noted = {line["store"]: line for line in read_extractions(tmp_path / "out")}
    committed = {line["store"]: line for line in read_extractions(RESULTS)}
    entry = noted["raw-1"]
    assert noted == {**committed, "raw-1": entry}  # the file can take the place of what is committed
    assert entry != committed["raw-1"]
    assert (entry["store"], entry["items"], entry["tokens"]) == ("raw-1", 40, 320)
    store = TokenStore(tmp_path / "stores" / "raw-1")
    assert [len(store.split(name)) for name in ("train", "validation", "test")] == [20, 8, 12]
    add_extraction(tmp_path / "out", {**entry, "seconds": 1.0}, [RESULTS], tmp_path / "lock")
    assert {line["store"]: line["seconds"] for line in read_extractions(tmp_path / "out")}["raw-1"] == 1.0
    assert len(read_extractions(tmp_path / "out")) == len(committed)


def test_tokens_of_points_are_there_normalised_too():
    class Long(Backbone):
        kind, layers, preparer, device = "points", {5: 4}, None, torch.device("cpu")

        def encode(self, units, dtype):
            pieces = [torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 100.0, 200.0, 300.0]])] * len(units)
            return Encoded({5: pieces}, [2] * len(units), torch.ones(len(units), dtype=torch.bool))

        def describe(self):
            return {"name": "long"}

    both = NormedToo(Long())
    encoded = both.encode([0, 1], "float32")
    assert dict(both.layers) == {5: 4, 6: 4}
    assert encoded.tokens[5][0].max() == 300
    for piece in encoded.tokens[6]:
        torch.testing.assert_close(piece.mean(1), torch.zeros(2), atol=1e-6, rtol=0)
        torch.testing.assert_close(piece[0], piece[1], atol=1e-4, rtol=0)
    assert set(both.describe()) == {"name", "layer 6"}
