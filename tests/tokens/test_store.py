"""The store keeps what it was given, and says so when it no longer can."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from cswe.tokens import Item, StoreSpec, StoreWriter, TokenStore, TokenStoreError, drop_damaged
from cswe.tokens.manifest import Manifest


def shard_files(store):
    return [store.path / entry.file for entry in store.manifest.shards]


def test_items_come_back_as_they_were(store, items):
    assert len(store) == 50
    assert len(store.manifest.shards) > 3
    for index in (0, 7, 49, -1):
        found, given = store[index], items[index]
        assert torch.equal(found.tokens.float(), given.tokens)
        assert torch.equal(found.weights, given.weights)
        assert torch.equal(found.cls.float(), given.cls)
        assert (found.id, found.split, int(found.label)) == (given.id, given.split, given.label)
    assert store.lengths.tolist() == [len(item.tokens) for item in items]
    assert store.labels.tolist() == [item.label for item in items]
    assert store.ids[3] == "item 3"
    assert store.split("test").tolist() == list(range(3, 50, 4))
    assert [item.id for item in store[1:3]] == ["item 1", "item 2"]
    with pytest.raises(IndexError, match="below 50"):
        store[50]
    with pytest.raises(ValueError, match="split"):
        store.split("dev")


def test_a_label_is_a_copy_too(store):
    store[0].label.add_(5)
    assert store[0].label == 0


@pytest.mark.parametrize("index", [1.7, "3", "item 3", [1, 2], None])
def test_a_position_is_a_whole_number(store, index):
    with pytest.raises(TypeError, match="index: expected a whole number or a slice but got"):
        store[index]
    assert store[np.int32(3)].id == store[torch.tensor(3)].id == "item 3"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_types(tmp_path, dtype):
    tokens = torch.tensor([[1.0, -2.5], [3.0, 0.125]])
    store = TokenStore.create(tmp_path, [Item(tokens)], dtype=dtype)
    assert store[0].tokens.dtype == getattr(torch, dtype)
    assert torch.equal(store[0].tokens.float(), tokens)
    assert store[0].label is None


def test_a_view_is_not_kept_and_a_read_is_a_copy(tmp_path):
    tokens = torch.ones(2, 2)
    store = TokenStore.create(tmp_path, [Item(tokens)], dtype="float32")
    store[0].tokens.zero_()
    assert store[0].tokens.sum() == 4
    # One buffer, filled anew for every item.
    filled = (Item(tokens.fill_(number), cls=tokens[0], weights=tokens[:, 0]) for number in (1, 2, 3))
    store = TokenStore.create(tmp_path / "buffer", filled, dtype="float32")
    for read in ([item.tokens for item in store], [item.cls for item in store], [item.weights for item in store]):
        assert [values.unique().tolist() for values in read] == [[1], [2], [3]]


def test_labels_of_every_kind(tmp_path):
    tokens = torch.ones(1, 1)
    several = TokenStore.create(
        tmp_path / "a", [Item(tokens, label=[1, 0, 1])], classes=["x", "y", "z"], label_kind="multilabel"
    )
    assert several.labels.tolist() == [[1.0, 0.0, 1.0]]
    real = TokenStore.create(tmp_path / "b", [Item(tokens, label=0.5), Item(tokens, label=1.5)])
    assert real.label_kind == "real"
    assert real.labels.tolist() == [[0.5], [1.5]]
    with pytest.raises(ValueError, match="below 2 but got 5"):
        TokenStore.create(tmp_path / "c", [Item(tokens, label=5)], classes=["x", "y"])


def test_several_layers(tmp_path):
    tokens = {6: torch.zeros(3, 2), 12: torch.ones(3, 4)}
    TokenStore.create(tmp_path, [Item(tokens, cls={6: torch.zeros(2), 12: torch.ones(4)})])
    assert TokenStore(tmp_path, layer=6).dim == 2
    assert TokenStore(tmp_path, layer=12)[0].tokens.sum() == 12
    assert TokenStore(tmp_path, layer=12).cls().tolist() == [[1.0] * 4]
    assert TokenStore(tmp_path, layer=12).cls([0, 0]).tolist() == [[1.0] * 4] * 2
    with pytest.raises(ValueError, match=r"one of \[6, 12\].*got None"):
        TokenStore(tmp_path)
    with pytest.raises(ValueError, match="got 9"):
        TokenStore(tmp_path, layer=9)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Item(torch.ones(2, 5), label=0), r"shape \(N, 4\) but got \(2, 5\)"),
        (Item(torch.ones(0, 4), label=0), "at least one token"),
        (Item(torch.full((1, 4), 1e6), label=0), "beyond float16; use bfloat16 or float32"),
        (Item(torch.full((1, 4), torch.nan), label=0), "NaN"),
        (Item(torch.ones(1, 4)), "label"),
        (Item(torch.ones(1, 4), label=0, split="dev"), "split.*'dev'"),
        (Item({1: torch.ones(1, 4)}, label=0), "layers"),
    ],
)
def test_a_wrong_item_is_refused(tmp_path, item, message):
    with pytest.raises(ValueError, match=message):
        TokenStore.create(tmp_path, [Item(torch.ones(2, 4), label=0), item])


def test_append_is_all_or_nothing(store, make_items, content):
    before = content(store.path)

    def failing():
        yield from make_items(30)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        store.append(failing())
    assert content(store.path) == before
    longer = store.append(make_items(30, seed=1))
    assert len(longer) == 80
    assert longer[79].id == "item 29"
    assert torch.equal(longer[10].tokens, store[10].tokens)
    longer.verify()


def test_a_store_is_not_overwritten_and_has_one_writer(store, make_items, tmp_path):
    with pytest.raises(TokenStoreError, match="holds a store already"):
        TokenStore.create(store.path, make_items(1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(TokenStoreError, match="empty folder"):
        TokenStore.create(tmp_path / "other", make_items(1))
    with (
        StoreWriter(store.path),
        pytest.raises(TokenStoreError, match="another process is writing"),
    ):
        store.append(make_items(1))


def test_a_writer_killed_before_its_first_manifest_is_no_obstacle(make_items, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "manifest.json.partial").write_text("{")
    store = TokenStore.create(tmp_path, make_items(3))
    assert len(store) == 3
    assert not (tmp_path / "manifest.json.partial").exists()


def test_unfinished_stores_say_so(tmp_path, make_items):
    spec = StoreSpec(layers={0: 4}, shard_bytes=100)
    with (
        pytest.warns(UserWarning, match=r"the last \d items added were not written"),
        StoreWriter(tmp_path, spec) as it,
    ):
        it.add_all(Item(item.tokens) for item in make_items(20))
    with pytest.raises(TokenStoreError, match=r"not finished.*--resume"):
        TokenStore(tmp_path)
    assert 0 < len(TokenStore(tmp_path, partial=True)) < 20
    with pytest.raises(TokenStoreError, match=r"no manifest\.json"):
        TokenStore(tmp_path / "nowhere")


def test_every_flipped_byte_is_found(store):
    file = shard_files(store)[1]
    data = bytearray(file.read_bytes())
    for position in {*range(0, len(data), 37), len(data) - 1}:
        data[position] ^= 0x10
        file.write_bytes(data)
        with pytest.raises(TokenStoreError, match=file.name):
            TokenStore(store.path, check=True)
        data[position] ^= 0x10
    file.write_bytes(data)
    TokenStore(store.path, check=True)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_shard_is_found_when_opened(store, size):
    file = shard_files(store)[2]
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(TokenStoreError, match=rf"{file.name}: is cut short.*--resume"):
        TokenStore(store.path)


def test_a_missing_shard_is_named(store):
    file = shard_files(store)[0]
    file.unlink()
    with pytest.raises(TokenStoreError, match=rf"{file.name}: this shard is missing.*--resume"):
        TokenStore(store.path)


def test_a_shard_of_another_store_is_recognised(store, make_items, tmp_path):
    other = TokenStore.create(tmp_path / "other", make_items(50), classes=["d", "e", "f"], shard_bytes=300)
    file = shard_files(store)[0]
    original = file.read_bytes()
    file.write_bytes(shard_files(other)[0].read_bytes())
    with pytest.raises(TokenStoreError, match=rf"{file.name}: is a shard of another store"):
        TokenStore(store.path)
    file.write_bytes(original)
    second = shard_files(store)[1]
    second.write_bytes(original)
    with pytest.raises(TokenStoreError, match=rf"{second.name}: is shard 0 of this store under the name of shard 1"):
        TokenStore(store.path)


def test_the_manifest_is_checked_too(store):
    file = store.path / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"a"', '"z"'))
    with pytest.raises(TokenStoreError, match=r"manifest\.json: was altered"):
        TokenStore(store.path)
    file.write_text(text[:100])
    with pytest.raises(TokenStoreError, match=r"manifest\.json: is damaged"):
        TokenStore(store.path)
    file.write_text(text)
    TokenStore(store.path)


def test_damaged_shards_are_dropped_listed_and_the_rest_kept(store):
    first, second = shard_files(store)[:2]
    first.unlink()
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    with pytest.warns(UserWarning, match="left out"):
        kept = TokenStore(store.path, check=True, skip_bad=True)
    assert [entry.number for entry, _ in kept.damaged] == [0, 1]
    assert [entry.number for entry in drop_damaged(store.path)] == [0, 1]
    healthy = TokenStore(store.path, check=True)
    lost = sum(entry.items for entry in store.manifest.shards[:2])
    assert len(healthy) == 50 - lost
    assert torch.equal(healthy[0].tokens, store[lost].tokens)
    listed = json.loads((store.path / "manifest.json").read_text())["dropped"]
    assert [entry["damage"].split(" ")[0] for entry in listed] == ["this", "was"]
    assert str(store.path) not in json.dumps(listed)


def test_the_manifest_names_no_place_and_no_time(store, make_items, tmp_path, content):
    again = TokenStore.create(tmp_path / "elsewhere", make_items(50), classes=["a", "b", "c"], shard_bytes=300)
    assert content(again.path) == content(store.path)
    assert str(tmp_path) not in (store.path / "manifest.json").read_text()


def test_statistics(tmp_path, make_items):
    items = [Item(item.tokens + 1000) for item in make_items(40)]
    store = TokenStore.create(tmp_path, items, dtype="float32")
    tokens = torch.cat([item.tokens for item in items]).double()
    measured = store.statistics()
    assert torch.allclose(measured.mean.double(), tokens.mean(0), atol=1e-3)
    assert measured.spread == pytest.approx(float(tokens.var(0, correction=0).mean().sqrt()), rel=1e-4)
    assert measured.norm_max == pytest.approx(float(tokens.norm(dim=1).max()), rel=1e-6)
    assert store.statistics(max_items=5).items == 5


def test_the_store_needs_no_optional_dependency(store):
    code = (
        "import sys\n"
        "for name in ('transformers', 'PIL', 'h5py', 'pandas', 'sklearn', 'scipy'): sys.modules[name] = None\n"
        "import cswe.tokens, cswe.tokens.extract, cswe.tokens.sources, cswe.tokens.backbones\n"
        f"store = cswe.tokens.TokenStore({str(store.path)!r})\n"
        "print(sum(len(batch) for batch in store.batches(8)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "50", done.stderr


def test_nothing_is_unpickled(store):
    np.save(store.path / "x.npy", np.array([object()]), allow_pickle=True)
    # The folder holds JSON and safetensors alone; what else lies in it is not looked at.
    assert len(TokenStore(store.path)) == 50
    assert Manifest.read(store.path).items == 50
