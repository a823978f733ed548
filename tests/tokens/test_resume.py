"""Going on with a store: nothing foreign is replaced, nothing changed is mixed in, and advice leads somewhere."""

import itertools
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cswe.tokens import Item, Manifest, StoreSpec, TokenStore, TokenStoreError, drop_damaged
from cswe.tokens.backbones import open_backbone
from cswe.tokens.extract import extract
from cswe.tokens.sources import open_source


def run(source, out, **options):
    backbone = open_backbone("identity", source)
    backbone.group = backbone.unit = 16
    return extract(source, backbone, out, **{"shard_bytes": 4000, "progress": False, **options})


@pytest.mark.parametrize("limit", [None, 100])
def test_damaged_items_that_were_appended_are_not_replaced_by_others(some_points, tmp_path, damage, content, limit):
    source = some_points(200)
    store = run(source, tmp_path, limit=limit)
    count, shards = len(store), len(store.manifest.shards)
    longer = store.append([Item(torch.ones(2, 8), 1, f"mine {number}") for number in range(10)])
    damage(longer, -1)
    before = content(tmp_path)
    with pytest.raises(TokenStoreError, match=r"`append` added its 10 items.*inspect --skip-bad"):
        run(source, tmp_path, limit=limit, resume=True)
    assert content(tmp_path) == before
    # As advised: and then the rest can be made again.
    damage(longer, 1)
    assert [entry.number for entry in drop_damaged(tmp_path)] == [1, shards]
    again = run(source, tmp_path, limit=limit, resume=True)
    assert again.ids == source.ids[:count]
    assert again.append([Item(torch.ones(2, 8), 1, "new")]).ids[-1] == "new"


def test_a_foreign_shard_is_not_replaced_though_it_was_dropped(some_points, tmp_path):
    store, other = (run(some_points(count), tmp_path / str(count)) for count in (100, 90))
    file = store.path / store.manifest.shards[0].file
    foreign = (other.path / other.manifest.shards[0].file).read_bytes()
    file.write_bytes(foreign)
    assert [entry.number for entry in drop_damaged(store.path)] == [0]
    with pytest.raises(TokenStoreError, match="move it away"):
        run(some_points(100), store.path, resume=True)
    assert file.read_bytes() == foreign
    file.unlink()
    assert len(run(some_points(100), store.path, resume=True)) == 100


class BrokenOffError(Exception):
    pass


def test_killed_at_any_touch_of_a_file_it_can_go_on(killer, some_points, tmp_path, content):
    source = some_points(100)
    whole = content(run(source, tmp_path / "whole").path)
    assert len(whole) >= 4
    for at in itertools.count():
        killed, other = tmp_path / f"{at}", tmp_path / f"other-{at}"
        if not killer(killed, at, run, source, killed):
            break
        killer(other, at, run, source, other)
        # Killed while it goes on, too.
        for again in (3, 7, 11):
            killer(killed, again, run, source, killed, resume=True)
        assert content(run(source, killed, resume=True).path) == whole
        # Begun in another way where nothing is lost by that.
        if not (other / "manifest.json").exists() or not Manifest.read(other).begun:
            assert len(run(source, other, dtype="float32")) == 100
            run(source, other, dtype="float32", resume=True)
    assert at > 20


def test_only_its_own_leftovers_are_removed(some_points, tmp_path):
    for name in ("mine.partial", "shards/mine.partial", "shards/00000.safetensors", "shards/00001.safetensors"):
        folder = tmp_path / Path(name).name
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
        Manifest(StoreSpec(layers={0: 8})).write(folder)
        with pytest.raises(TokenStoreError, match="empty folder"):
            run(some_points(20), folder)
        assert (folder / name).read_text() == "precious"
    # A shard that the manifest has lost may be all that is left of a store.
    store = run(some_points(20), tmp_path / "store")
    (store.path / "manifest.json").unlink()
    with pytest.raises(TokenStoreError, match=r"holds shards but no manifest\.json; restore it"):
        run(some_points(20), store.path, resume=True)
    assert (store.path / store.manifest.shards[0].file).exists()
    (tmp_path / "folder" / "shards" / "inner").mkdir(parents=True)
    with pytest.raises(TokenStoreError, match="empty folder"):
        run(some_points(20), tmp_path / "folder")


def test_items_that_changed_are_not_put_beside_what_they_were(tmp_path):
    def points(values):
        np.savez(tmp_path / "sets.npz", points=values)
        return open_source(tmp_path / "sets.npz")

    def broken_off(source, out):
        load, source.load = (
            source.load,
            lambda index: load(index) if index < 60 else (_ for _ in ()).throw(BrokenOffError),
        )
        with pytest.raises(BrokenOffError):
            run(source, out, shard_bytes=600)

    values = np.ones((100, 4, 3), dtype=np.float32)
    broken_off(points(values), tmp_path / "store")
    with pytest.raises(
        TokenStoreError, match=r"00000.*items '0' to '31', some of which have changed.*remove this file"
    ):
        run(points(values * 2), tmp_path / "store", shard_bytes=600, resume=True)
    # What is not yet there may change: a bad item that was repaired.
    values[60:] = 3
    store = run(points(values), tmp_path / "store", shard_bytes=600, resume=True)
    assert [float(store[index].tokens[0, 0]) for index in (0, 99)] == [1, 3]
    # A store of before this was noted down is taken as it is.
    replace(store.manifest, shards=tuple(replace(entry, content="") for entry in store.manifest.shards)).write(
        store.path
    )
    assert len(run(points(values * 2), store.path, shard_bytes=600, resume=True)) == 100


def test_what_a_source_knows_of_its_items_without_reading_them(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs the extra 'data'")

    def zipped(data):
        with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
            archive.writestr("train/n01/images/n01_0.JPEG", data)
        return tmp_path / "z.zip"

    def written(text):
        (tmp_path / "p.fasta").write_text(text)
        return tmp_path / "p.fasta"

    def drawn(size):
        (tmp_path / "images" / "a").mkdir(parents=True, exist_ok=True)
        image.new("RGB", (size, 8)).save(tmp_path / "images" / "a" / "1.png")
        return tmp_path / "images"

    for make, content in (
        (zipped, (b"some", b"some", b"same")),
        (written, (">A\nMK", ">A\nM\nK", ">A\nMM")),
        (drawn, (8, 8, 800)),
    ):
        one, same, other = (open_source(make(part)).content(0, 1) for part in content)
        assert one == same != other


def test_a_run_that_has_made_nothing_yet_may_begin_in_another_way(some_points, tmp_path):
    class Large(some_points):
        def load(self, index):
            points = super().load(index)
            points.points[:] *= 1e6
            return points

    with pytest.raises(TokenStoreError, match=r"float16 cannot hold.*into a new folder with another --dtype"):
        run(Large(40), tmp_path / "a")
    assert len(run(Large(40), tmp_path / "a", dtype="bfloat16")) == 40
    with pytest.raises(TokenStoreError, match="Repair it, or leave") as error:
        run(some_points(40, bad=(3,)), tmp_path / "b")
    assert "remove" not in str(error.value)  # another data set, with which the store could not be resumed
    assert len(run(some_points(39), tmp_path / "b", resume=True)) == 39


def test_only_true_differences_are_told(tmp_path):
    spec = StoreSpec(layers={0: 4}, preprocessing={"mean": (0.5, 0.5), "size": {"resize": (1, 2)}})
    Manifest(spec).write(tmp_path)
    there = Manifest.read(tmp_path).spec
    assert there.difference(replace(spec, dtype="float32")) == "dtype: 'float16' there, 'float32' now"


def test_a_part_without_items_is_told(tmp_path):
    np.savez(tmp_path / "few.npz", points=np.ones((16, 6, 3)), labels=np.arange(16) // 4)
    with pytest.warns(UserWarning, match="point-sets: no items for validation and test"):
        store = run(open_source(tmp_path / "few.npz"), tmp_path / "store")
    assert TokenStore(store.path).splits == ("train",)
    np.savez(tmp_path / "sorted.npz", points=np.ones((3, 6, 3)), labels=[0, 0, 0], splits=["train", "val", "test"])
    with pytest.warns(UserWarning, match="no items for test; the first 2 items, which are all that was asked for"):
        run(open_source(tmp_path / "sorted.npz"), tmp_path / "limited", limit=2)
