"""Few labels of every class, and vectors that are judged without a head."""

import numpy as np
import pytest
import torch

from cswe.tokens import TokenStore
from cswe.training import TrainingData, UserError, fit, recipe
from cswe.training.cells import Cell
from cswe.training.checkpoint import BEST, LAST, load
from cswe.training.compare import Shelf, run_cell
from cswe.training.data import scoring_size
from cswe.training.evaluate import nearest_accuracy
from cswe.training.folder import saved_epoch
from cswe.training.provenance import commit

CPU = torch.device("cpu")
TINY = recipe("digits").with_(pool="moments", slices=4, epochs=2, batch_size=16)


@pytest.fixture(scope="module")
def store(make_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("few") / "store"
    return make_store(folder, [number // 4 % 3 for number in range(120)], classes=["a", "b", "c"])


def classes_of(data):
    return np.bincount(data.labels().numpy()).tolist()


def test_an_accelerator_scores_many_sets_at_a_time():
    gpu = torch.device("cuda")
    for size, scored in ((16, 256), (256, 256), (1024, 1024)):
        chosen = TINY.with_(batch_size=size)
        assert (scoring_size(chosen, gpu), scoring_size(chosen, CPU)) == (scored, size)


def test_so_many_of_every_class_by_the_seed(store):
    data = TrainingData.open(store, TINY.with_(labels_per_class=5), CPU)
    drawn = {seed: data.drawn(seed) for seed in (0, 1)}
    for few in drawn.values():
        assert classes_of(few) == [5, 5, 5]
        assert set(few.train.items) <= set(data.train.items)
        assert len(few.validation.items) == len(data.validation.items)
    assert not np.array_equal(drawn[0].train.items, drawn[1].train.items)
    assert np.array_equal(data.drawn(0).train.items, drawn[0].train.items)
    fewer = TrainingData.open(store, TINY.with_(labels_per_class=2), CPU).drawn(0)
    assert set(fewer.train.items) < set(drawn[0].train.items)
    everything = TrainingData.open(store, TINY.with_(labels_per_class=1000), CPU).drawn(0)
    assert np.array_equal(everything.train.items, data.train.items)


def test_a_run_sees_no_more_than_its_labels(store, tmp_path):
    data = TrainingData.open(store, TINY.with_(labels_per_class=1, keep_tokens=0.5), CPU)
    seen = []
    original = data.train._gather
    data.train._gather = lambda indices, layout: seen.extend(indices.tolist()) or original(indices, layout)
    list(fit(data, tmp_path / "run", seed=7))
    assert set(seen) == set(data.drawn(7).train.items.tolist())
    assert len(set(seen)) == 3


def test_labels_that_are_no_classes_are_refused(make_store, tmp_path):
    numbers = make_store(tmp_path / "store", [float(number) for number in range(20)])
    data = TrainingData.open(numbers, TINY.with_(labels_per_class=1), CPU)
    with pytest.raises(UserError, match="labels_per_class"):
        list(fit(data, tmp_path / "run"))


def test_without_its_last_state_a_run_ends_the_same(store, tmp_path):
    data = TrainingData.open(store, TINY, CPU)
    records = [list(fit(data, tmp_path / name, keep_last=keep)) for name, keep in (("kept", True), ("not", False))]
    assert [record["loss"] for record in records[0]] == [record["loss"] for record in records[1]]
    assert (tmp_path / "kept" / LAST).exists()
    assert not (tmp_path / "not" / LAST).exists()
    assert saved_epoch(tmp_path / "not") is not None


def test_the_nearest_training_set_is_found_by_hand(store, tmp_path):
    shelf = Shelf(store.path, CPU)
    cell = Cell("moments", 0, 4, 0, TINY)
    result = run_cell(cell, tmp_path / "run", shelf, neighbors=True)
    model = load(tmp_path / "run" / BEST)
    known, asked = TokenStore(store.path), store.split("test")
    train = store.split("train")

    def vectors(items):
        rows = [model.normalization(model.embed(known[int(item)].tokens.float().unsqueeze(0))) for item in items]
        return torch.nn.functional.normalize(torch.cat(rows).double(), dim=1)

    with torch.no_grad():
        nearest = (vectors(asked) @ vectors(train).T).argmax(1)
    right = known.labels[torch.from_numpy(train)][nearest] == known.labels[torch.from_numpy(asked)]
    assert result.scores["test"]["nearest"] == pytest.approx(float(right.double().mean()))
    assert "nearest" in result.scores["validation"]
    assert "nearest" not in result.scores["train"]


def test_neighbours_need_classes(make_store, tmp_path):
    numbers = make_store(tmp_path / "store", [float(number) for number in range(20)])
    data = TrainingData.open(numbers, TINY, CPU)
    list(fit(data, tmp_path / "run"))
    with pytest.raises(UserError, match="neighbors"):
        nearest_accuracy(load(tmp_path / "run"), data.train, {"validation": data.validation})


def test_other_sizes_of_batches_share_what_is_open(store):
    shelf = Shelf(store.path, CPU)
    first = shelf.data(0, TINY)
    second = shelf.data(0, TINY.with_(batch_size=8, labels_per_class=2))
    assert (first.train.batch_size, second.train.batch_size) == (16, 8)
    assert first.train._gather is second.train._gather
    assert classes_of(second.drawn(3)) == [2, 2, 2]


def test_a_copy_of_the_source_can_be_told_its_commit(monkeypatch):
    monkeypatch.setenv("CSWE_COMMIT", "abc123")
    monkeypatch.setattr("cswe.training.provenance._git", lambda folder, *words: "older")
    assert commit.__wrapped__() == "abc123"  # whatever repository it lies in
    monkeypatch.delenv("CSWE_COMMIT")
    assert commit.__wrapped__() == "older+"
    monkeypatch.setattr("cswe.training.provenance._git", lambda *words: (_ for _ in ()).throw(OSError))
    assert commit.__wrapped__() is None
