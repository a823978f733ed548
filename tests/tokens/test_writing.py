"""Two writers do not undo each other's work, wrong items are refused, and writing many small ones is quick."""

import errno
import pickle
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cswe.tokens import Item, LabelSpec, StoreSpec, StoreWriter, TokenStore, TokenStoreError, drop_damaged
from cswe.tokens import shards as shards_module
from cswe.tokens import store as store_module
from cswe.tokens.manifest import Manifest
from cswe.tokens.shards import Columns, _blocks

ONES = torch.ones(2, 2)


def test_what_another_writer_adds_while_damage_is_looked_for_is_not_lost(store, make_items, damage, monkeypatch):
    damage(store, 1)
    added = replace(make_items(1)[0], id="precious")
    check, tried, done = store_module.check_bytes, [], []

    def meanwhile(*arguments):
        if not tried:
            tried.append(True)
            with suppress(TokenStoreError):  # it may be refused; but once it is done, it is done
                store.append([added])
                done.append(True)
        return check(*arguments)

    monkeypatch.setattr(store_module, "check_bytes", meanwhile)
    assert [entry.number for entry in drop_damaged(store.path)] == [1]
    assert tried
    assert ("precious" in TokenStore(store.path).ids) == bool(done)


def test_two_that_append_at_once_both_do(store, make_items, monkeypatch):
    mine, other = (replace(make_items(1)[0], id=name) for name in ("mine", "another's"))
    read, looked = Manifest.read, []

    def meanwhile(path):
        found = read(path)
        if not looked:
            looked.append(True)
            TokenStore(store.path).append([other])
        return found

    monkeypatch.setattr(Manifest, "read", meanwhile)
    assert store.append([mine]).ids[50:] == ["another's", "mine"]


def test_a_store_that_could_not_be_created_is_no_obstacle(tmp_path, make_items):
    with pytest.raises(ValueError, match="item 'wrong'"):
        TokenStore.create(tmp_path, [*make_items(30), Item(ONES, id="wrong")], shard_bytes=300)
    assert len(TokenStore.create(tmp_path, make_items(3))) == 3


def test_a_writer_that_has_written_no_shard_is_no_obstacle(tmp_path, make_items):
    with StoreWriter(tmp_path, StoreSpec(layers={0: 7})):
        pass  # broken off
    assert len(TokenStore.create(tmp_path, make_items(3))) == 3


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({}, {"label": 5}, "'then': expected no label"),
        ({}, {"cls": torch.ones(2)}, "'then': expected no cls"),
        ({}, {"weights": torch.ones(2)}, "'then': expected no weights"),
        ({}, {"tokens": {0: ONES, 1: ONES}}, r"'then': tokens: expected layers \[0\] but got \[0, 1\]"),
        ({"label": 1}, {}, "'then': expected a value for label"),
        ({"weights": torch.ones(2)}, {"weights": torch.tensor([1.0, torch.inf])}, "'then': expected finite weights"),
        ({"weights": torch.ones(2)}, {"weights": torch.tensor([1.0, -1.0])}, "'then': .*not negative"),
        ({"weights": torch.ones(2)}, {"weights": torch.zeros(2)}, "'then': .*not all zero"),
        ({"label": 0.5}, {"label": float("nan")}, "'then': label: expected finite numbers.*nan"),
        ({"label": 1}, {"label": "cat"}, "'then': label: expected a number.*'cat'"),
        ({"label": "cat"}, {}, "label: expected a number.*'cat'"),
        ({"label": [0.5, 1.0]}, {"label": [0.5]}, "'then': label: expected 2 numbers an item but got 1"),
        ({}, {"id": "\ud800"}, r"item '\\ud800': expected an id that UTF-8 can hold"),
        ({}, {"tokens": [[1.0, 2.0], [3.0]]}, "'then': tokens: expected a table of numbers but got"),
        ({}, {"tokens": None}, "'then': tokens: expected a table of numbers but got None"),
        ({}, {"tokens": ONES.to(torch.complex64)}, "'then': tokens: expected real numbers"),
        ({"tokens": None}, {}, "'first': tokens: expected a table of numbers but got None"),
        ({"tokens": torch.ones(2, 0)}, {}, r"layers: expected dimensions of at least 1 but got \{0: 0\}"),
    ],
)
def test_what_the_store_cannot_hold_is_refused(tmp_path, first, then, message):
    items = [Item(**{"tokens": ONES, "id": name, **fields}) for name, fields in (("first", first), ("then", then))]
    with pytest.raises(ValueError, match=message):
        TokenStore.create(tmp_path, items)


def test_an_id_is_text(tmp_path):
    with pytest.raises(TypeError, match=r"item 7: expected id to be text but got int"):
        TokenStore.create(tmp_path, [Item(ONES, id=7)])


@pytest.mark.parametrize(
    ("label", "classes", "message"),
    [
        (1.0, ["a", "b"], "classes: expected a name for each of 1 real numbers but got 2.*class numbers are integers"),
        (1, ["a", "b", "a"], "classes: expected every name once but 'a' comes again"),
    ],
)
def test_names_that_do_not_fit_the_labels_are_refused(tmp_path, label, classes, message):
    with pytest.raises(ValueError, match=message):
        TokenStore.create(tmp_path, [Item(ONES, label=label)], classes=classes)


@pytest.mark.parametrize("name", ["shard_bytes", "layers"])
def test_what_is_written_can_be_read_so_counts_are_whole_numbers(tmp_path, name):
    counts = {"shard_bytes": 2.0**20} if name == "shard_bytes" else {}
    item = Item({1.5: ONES} if name == "layers" else ONES)
    with pytest.raises(ValueError, match=rf"{name}: expected whole numbers but got 1\d*\.\d"):
        TokenStore.create(tmp_path, [item], **counts)


def test_numbers_and_names_of_numpy_are_as_good(tmp_path):
    items = [Item({np.int64(3): ONES}, label=number) for number in (0, 1)]
    whole = {"shard_bytes": np.int64(2**20)}
    store = TokenStore.create(tmp_path / "a", items, classes=np.unique(["dog", "cat"]), **whole)
    assert (store.layers, store.label_names) == ([3], ("cat", "dog"))
    assert TokenStore.create(tmp_path / "b", items, classes=np.arange(2)).label_names == (0, 1)


@pytest.mark.parametrize("kind", [np.uint64, np.uint16, np.int8, np.bool_])
def test_a_label_may_be_a_number_of_numpy_of_any_kind(tmp_path, kind):
    assert TokenStore.create(tmp_path, [Item(ONES, label=kind(1))]).labels.tolist() == [1]


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, lambda ones: torch.nested.nested_tensor([ones])])
def test_tokens_are_dense(tmp_path, make):
    with pytest.raises(ValueError, match="'a': tokens: expected a dense tensor"):
        TokenStore.create(tmp_path, [Item(make(ONES), id="a")])


def test_values_beyond_every_type_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"1e\+39 is beyond float32$"):
        TokenStore.create(tmp_path, [Item(torch.full((1, 1), 1e39, dtype=torch.float64))], dtype="float32")


def test_a_file_is_no_store_and_no_place_for_one(tmp_path, make_items):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(TokenStoreError, match=f"{file}: expected a folder but got a file; choose another"):
        TokenStore.create(file, make_items(3))
    with pytest.raises(TokenStoreError, match=f"{file}: expected the folder of a token store but got a file"):
        TokenStore(file)


def test_several_labels_are_zeros_and_ones():
    spec = LabelSpec("multilabel", ("a", "b"), 2)
    with pytest.raises(ValueError, match=r"0 or 1 for every class but got 0\.7"):
        spec.column([[0.7, 1]])
    assert spec.column([[True, False]]).tolist() == [[1, 0]]


def test_arrays_are_as_good_as_tensors(tmp_path):
    item = Item(np.ones((2, 3), dtype=np.float32), weights=np.ones(2), cls=np.zeros(3))
    assert TokenStore.create(tmp_path / "a", [item])[0].weights.tolist() == [1, 1]
    written_elsewhere = Item(np.arange(6, dtype=">f8").reshape(2, 3), label=np.array([0.5], dtype=">f4"))
    (read,) = TokenStore.create(tmp_path / "b", [written_elsewhere])
    assert (read.tokens.tolist(), read.label.tolist()) == ([[0, 1, 2], [3, 4, 5]], [0.5])


def test_a_store_travels_to_another_process(store):
    again = pickle.loads(pickle.dumps(store))
    assert torch.equal(again[7].tokens, store[7].tokens)
    assert (again.ids, again.lengths.tolist()) == (store.ids, store.lengths.tolist())
    assert next(iter(again.batches(5))).index.tolist() == next(iter(store.batches(5))).index.tolist()


READER = """
import os, sys
import torch
from cswe.tokens import TokenStore

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    store = TokenStore("store")
    options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "spawn"}
    print([item.id for item in torch.utils.data.DataLoader(store, **options)] == store.ids)
"""


def test_a_relative_path_is_where_it_was_when_it_was_given(store, make_items, tmp_path, monkeypatch):
    (tmp_path / "read.py").write_text(READER)
    # Spawned processes begin in the folder that their parent began in, not in the one it went to.
    words = [sys.executable, str(tmp_path / "read.py"), str(store.path.parent)]
    answer = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
    assert answer.stdout == "True\n", answer.stderr
    monkeypatch.chdir(store.path.parent)
    near, packed = TokenStore("store"), pickle.dumps(TokenStore("store"))
    assert str(near.append(make_items(1)).path) == "store"
    monkeypatch.chdir("/")
    near.verify()
    assert pickle.loads(packed)[7].id == "item 7"
    assert len(near.append(make_items(1))) == 52


def test_items_that_could_not_be_written_are_still_in_hand(make_items, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    items = make_items(9)
    spec = StoreSpec({0: 4}, labels=LabelSpec("class"), cls=True, weights=True, shard_bytes=100)
    with StoreWriter(str(tmp_path / "store"), spec) as writer:
        writer.add_all(items[:4])
        for item in items[4:8]:  # a loop that passes over errors
            with monkeypatch.context() as patch, suppress(TokenStoreError):
                patch.setattr(shards_module, "_blocks", full)
                writer.add(item)
        writer.add(items[8])
        writer.finish()
    assert TokenStore(tmp_path / "store").ids == [item.id for item in items]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("what", ["", "shards/00007.safetensors", "manifest.json"])
def test_what_cannot_be_written_is_named(store, make_items, monkeypatch, what, code):
    def refuse(path, *arguments, **options):
        raise OSError(code, "so it is", str(path))

    def only_read(path, *arguments, **options):
        return (refuse if path.name == f"{Path(what).name}.partial" else opened)(path, *arguments, **options)

    opened = Path.open
    monkeypatch.setattr(Path, "open" if what else "mkdir", only_read if what else refuse)
    monkeypatch.setattr(Path, "unlink", refuse)  # as on a disk that is there to be read
    message = rf"{re.escape(str(store.path / what))}: could not be written \(so it is\); see that files may be written"
    with pytest.raises(TokenStoreError, match=message):
        TokenStore(store.path).append(make_items(1))


def test_work_grows_with_the_items_and_not_with_their_square(tmp_path):
    def calls(count):
        seen = []
        sys.setprofile(lambda frame, event, argument: seen.append(event))
        try:
            TokenStore.create(tmp_path / str(count), (Item(ONES) for _ in range(count)))
        finally:
            sys.setprofile(None)
        return seen.count("call")

    assert calls(800) < 5 * calls(200)


def test_small_pieces_are_written_in_few_blocks():
    count = 3000
    tokens = torch.arange(6.0 * count).half().view(2 * count, 3)
    shared = {"lengths": [2] * count, "ids": [""] * count, "splits": [0] * count}
    small = list(_blocks(StoreSpec({0: 3}), Columns({0: list(tokens.split(2))}, **shared), 0))
    whole = list(_blocks(StoreSpec({0: 3}), Columns({0: [tokens]}, **shared), 0))
    assert b"".join(small) == b"".join(whole)
    assert len(small) < 20
