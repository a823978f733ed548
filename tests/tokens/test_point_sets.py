"""Files of point sets: large ones are read, wrong ones are refused by name."""

import numpy as np
import pytest

from cswe.tokens.errors import BadItemError
from cswe.tokens.sources import SourceOptions, open_source, point_sets

POINTS = np.random.Generator(np.random.PCG64(0)).random((20, 6, 3), dtype=np.float32)
ONE_HOT = np.eye(2, dtype=np.int64)[np.arange(20) % 2]


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"labels": ONE_HOT}, {"label_kind": "class"}, r"one class an item.*\(20, 2\)"),
        ({"labels": ONE_HOT, "splits": ["train"] * 20}, {"label_kind": "class"}, r"one class an item.*\(20, 2\)"),
        ({"labels": np.linspace(0, 2.9, 20)}, {"label_kind": "class"}, "not whole"),
        ({"labels": np.where(np.arange(20) == 3, np.nan, 1.0)}, {}, "finite numbers.*nan"),
        ({"labels": np.where(np.arange(20) == 3, np.nan, 1.0)}, {"label_kind": "class"}, "not whole"),
        ({"labels": np.array(3)}, {}, r"20 labels but got shape \(\)"),
        ({"labels": np.arange(20) - 1}, {}, "class numbers from 0 on but got -1"),
        ({"labels": ONE_HOT * 2}, {}, "0 or 1 for every class but got 2"),
        ({"labels": np.array(["a", "b"] * 10)}, {"label_kind": "real"}, "expected a number"),
        ({"weights": np.ones((19, 6))}, {}, r"weights to be numbers of shape \(20, 6\) but got .* \(19, 6\)"),
        ({"splits": ["someday"] * 20}, {}, "expected the split to be one of .*'someday'"),
        ({"ids": ["a"] * 20}, {}, "every id once but 'a' comes again"),
        ({"points": np.full((20, 6, 3), "x")}, {}, "points to be numbers"),
        ({"points": POINTS.reshape(-1, 3), "ptr": np.array([], dtype=np.int64)}, {}, "ptr, whole numbers"),
        ({"points": POINTS[:0]}, {}, "found none"),
        ({"labels": np.zeros(20, dtype="i4,f4")}, {}, r"labels: expected numbers or text but got .*'f0'"),
        ({"ids": np.array([b"\xe9"] * 20)}, {}, r"ids: expected text in UTF-8 but got b'\\xe9'"),
        ({"labels": np.array([b"\xe9"] * 20)}, {}, r"labels: expected text in UTF-8 but got b'\\xe9'"),
    ],
)
def test_a_wrong_array_is_refused(tmp_path, arrays, options, message):
    np.savez(tmp_path / "sets.npz", **{"points": POINTS, **arrays})
    with pytest.raises(ValueError, match=f"sets.npz: .*{message}"):
        open_source(tmp_path / "sets.npz", options=SourceOptions(**options))


def test_whole_numbers_are_classes_whatever_their_type(tmp_path):
    np.savez(tmp_path / "sets.npz", points=POINTS, labels=np.arange(20.0)[:, None] % 3)
    labels = open_source(tmp_path / "sets.npz", options=SourceOptions(label_kind="class")).labels
    assert labels.values.tolist() == [number % 3 for number in range(20)]


@pytest.mark.parametrize("labels", [ONE_HOT, np.linspace(0, 1, 20), np.arange(20) % 3])
def test_the_order_of_bytes_does_not_matter(tmp_path, labels):
    np.savez(tmp_path / "here.npz", points=POINTS, labels=labels)
    elsewhere = {"points": POINTS.astype(">f4"), "labels": labels.astype(labels.dtype.newbyteorder(">"))}
    np.savez(tmp_path / "elsewhere.npz", **elsewhere)
    here, there = (open_source(tmp_path / f"{name}.npz") for name in ("here", "elsewhere"))
    assert here.labels.spec == there.labels.spec
    assert here.labels.values.equal(there.labels.values)
    assert np.array_equal(here.load(3).points, there.load(3).points)


@pytest.mark.parametrize("name", ["mask", "attention_mask"])
@pytest.mark.parametrize("suffix", ["npz", "h5"])
def test_padding_is_left_out(tmp_path, name, suffix):
    lengths = np.arange(20) % 6 + 1
    mask = np.arange(6) < lengths[:, None]
    arrays = {"points": np.where(mask[:, :, None], POINTS, np.nan), "weight": mask * 2.0, name: mask.astype("i8")}
    arrays |= {"split": ["val"] * 20, "id": [f"set {number}" for number in range(20)]}
    file = tmp_path / f"sets.{suffix}"
    if suffix == "npz":
        np.savez(file, **arrays, strange=1)
    else:
        with pytest.importorskip("h5py").File(file, "w") as content:
            for key, values in (arrays | {"strange": 1}).items():
                content[key] = values
    source = open_source(file)
    assert (source.splits.tolist(), source.ids[3]) == ([1] * 20, "set 3")
    assert source.left_out == "arrays that are none of those looked for: strange"
    assert np.array_equal(source.load(3).points, POINTS[3, :4].astype("f4"))
    assert source.load(3).weights.tolist() == [2] * 4
    assert source.options()["mask"] == name


def test_a_mask_is_of_zeros_and_ones_in_the_layout_of_the_points(tmp_path):
    np.savez(tmp_path / "sets.npz", points=POINTS, mask=np.full((20, 6), 2))
    with pytest.raises(BadItemError, match="a mask that is not of 0 and 1"):
        open_source(tmp_path / "sets.npz").load(0)
    for wrong in (np.ones((20, 5), bool), np.full((20, 6), "1"), np.ones(6, bool)):
        np.savez(tmp_path / "sets.npz", points=POINTS, mask=wrong)
        with pytest.raises(ValueError, match=r"sets\.npz: expected mask to be numbers of shape \(20, 6\) but got"):
            open_source(tmp_path / "sets.npz")
    before = {"points": POINTS, "mask": np.ones((20, 6), bool)}
    np.savez(tmp_path / "sets.npz", **before)
    content = open_source(tmp_path / "sets.npz").content(0, 20)
    before["mask"][7, 2] = False
    np.savez(tmp_path / "sets.npz", **before)
    assert open_source(tmp_path / "sets.npz").content(0, 20) != content


def test_an_array_of_nothing_counts_as_not_there(tmp_path):
    h5py = pytest.importorskip("h5py", reason="needs the extra 'data'")
    with h5py.File(tmp_path / "few.h5", "w") as file:
        file["points"], file["labels"], file["ids"] = POINTS, h5py.Empty("i8"), h5py.Empty("S1")
    source = open_source(tmp_path / "few.h5")
    assert (source.labels.spec.kind, source.ids[:2]) == ("none", ["0", "1"])
    with h5py.File(tmp_path / "sets.h5", "w") as file:
        file["points"] = h5py.Empty("f4")
    with pytest.raises(ValueError, match=r"sets\.h5: expected an array named one of"):
        open_source(tmp_path / "sets.h5")


def test_weights_that_are_not_finite_make_a_bad_item(tmp_path):
    from cswe.tokens.backbones.point_batches import PointPreparer

    weights = np.ones((20, 6), dtype=np.float32)
    weights[2, 1] = np.inf
    np.savez(tmp_path / "sets.npz", points=POINTS, weights=weights)
    source, preparer = open_source(tmp_path / "sets.npz"), PointPreparer(3, weighted=True)
    assert preparer.one(source.load(1)) is not None
    with pytest.raises(BadItemError, match="finite weights"):
        preparer.one(source.load(2))


@pytest.mark.parametrize("points", [0, -2])
def test_at_least_one_point_is_drawn(tmp_path, points):
    np.savez(tmp_path / "sets.npz", points=POINTS)
    with pytest.raises(ValueError, match=f"points: expected at least 1 but got {points}"):
        open_source(tmp_path / "sets.npz", options=SourceOptions(points=points))


def test_arrays_may_be_large_and_pack_well(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "sets.NPZ.npz", points=np.zeros((600, 600, 1)))  # 1,000 to 1
    (tmp_path / "sets.NPZ.npz").rename(tmp_path / "sets.NPZ")
    assert len(open_source(tmp_path / "sets.NPZ")) == 600
    monkeypatch.setattr(point_sets, "_memory", lambda: 1000)
    with pytest.raises(ValueError, match="more than this machine's memory"):
        open_source(tmp_path / "sets.NPZ")


def test_a_flipped_byte_is_found(tmp_path):
    file = tmp_path / "sets.npz"
    np.savez(file, points=POINTS)
    data = bytearray(file.read_bytes())
    data[300] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"sets.npz: .*CRC.*write it again"):
        open_source(file)
