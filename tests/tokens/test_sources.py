"""Data sets as they are distributed, and the traps in archives."""

import gzip
import io
import pickle
import re
import stat
import zipfile

import numpy as np
import pytest

from cswe.tokens.errors import BadItemError
from cswe.tokens.sources import SourceOptions, open_source
from cswe.tokens.sources.fasta import Fasta
from cswe.tokens.sources.image_folder import ImageFolder
from cswe.tokens.sources.localization import Localization
from cswe.tokens.sources.modelnet import ModelNet
from cswe.tokens.sources.point_sets import PointSets
from cswe.tokens.sources.tiny_imagenet import TinyImageNet

Image = pytest.importorskip("PIL.Image", reason="needs the extra 'data'")
h5py = pytest.importorskip("h5py", reason="needs the extra 'data'")
pytest.importorskip("sklearn", reason="needs the extra 'data'")


def jpeg(seed: int, size: tuple[int, int] = (64, 64)) -> bytes:
    pixels = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (*size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture
def tiny(tmp_path):
    """A Tiny ImageNet of two classes: as a folder, as a zip, and as two zips."""
    files = {
        "wnids.txt": b"n01\nn02\n",
        "val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t1\t1\nval_1.JPEG\tn01\t0\t0\t1\t1\n",
    }
    for number, wnid in enumerate(("n01", "n02")):
        for image in range(11):
            files[f"train/{wnid}/images/{wnid}_{image}.JPEG"] = jpeg(100 * number + image)
    for image in range(2):
        files[f"val/images/val_{image}.JPEG"] = jpeg(1000 + image)
    root = tmp_path / "tiny-imagenet-200"
    parts = [tmp_path / "whole.zip", tmp_path / "part0.zip", tmp_path / "part1.zip"]
    archives = [zipfile.ZipFile(part, "w") for part in parts]
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        archives[0].writestr(f"tiny-imagenet-200/{name}", data)
        archives[2 if "n02" in name else 1].writestr(f"tiny-imagenet-200/{name}", data)
    for archive in archives:
        archive.close()
    return root, parts


def test_tiny_imagenet_is_the_same_in_every_form(tiny):
    root, (whole, *parts) = tiny
    sources = [open_source(root), open_source(whole), open_source(parts)]
    assert {type(source) for source in sources} == {TinyImageNet}
    assert sources[0].describe() == sources[1].describe() == sources[2].describe()
    for source in sources:
        assert len(source) == 24
        assert source.ids[2] == "train/n01/images/n01_2.JPEG"
        assert np.bincount(source.splits).tolist() == [20, 2, 2]
        assert source.labels.values[-2:].tolist() == [1, 0]
        assert np.array_equal(np.asarray(source.load(5)), np.asarray(sources[0].load(5)))


def test_a_missing_part_is_noticed(tiny):
    _, (_, _, second) = tiny
    assert len(open_source(second)) == 11  # a part without val is a data set of its own
    with pytest.raises(ValueError, match="none of that name"):
        open_source(second.with_name("part9.zip"))


def test_images_that_cannot_be_read_are_bad_items(tiny):
    root, _ = tiny
    (root / "train/n01/images/n01_3.JPEG").write_bytes(b"no image")
    (root / "train/n01/images/n01_4.JPEG").write_bytes(jpeg(1)[:300])
    source = open_source(root)
    for index in (3, 4):
        with pytest.raises(BadItemError, match=r"is not an image that can be read \(\w+\)") as error:
            source.load(index)
        assert "0x" not in str(error.value)  # no memory address: it goes into the manifest
    assert source.locate(3).endswith("n01_3.JPEG")


def test_an_image_that_would_fill_the_memory(monkeypatch, tiny):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(BadItemError, match="too large"):
        open_source(tiny[0]).load(0)


@pytest.mark.parametrize("name", ["../outside.JPEG", "/etc/passwd", "a/../../b", "C:/x", "a\\..\\b"])
def test_an_archive_that_leads_outside_is_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("x/train/n01/images/n01_0.JPEG", jpeg(0))
        archive.writestr(name, b"x")
    with pytest.raises(ValueError, match="not to be trusted"):
        open_source(tmp_path / "bad.zip", "tiny-imagenet")


def test_bombs_and_links_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/train/n01/images/n01_0.JPEG", bytes(20 * 2**20))
    with pytest.raises(ValueError, match="packed"):
        open_source(tmp_path / "bomb.zip")
    link = zipfile.ZipInfo("x/train/n01/images/n01_0.JPEG")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(ValueError, match="link"):
        open_source(tmp_path / "link.zip")
    (tmp_path / "cut.zip").write_bytes(b"PK\3\4 not a zip")
    with pytest.raises(ValueError, match="download it again"):
        open_source(tmp_path / "cut.zip")


def test_a_gzip_bomb_is_stopped(tmp_path, monkeypatch):
    import cswe.tokens.sources.tables as tables

    monkeypatch.setattr(tables, "MAX_BYTES", 1000)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"sequence,label\n" + b"A,b\n" * 1000))
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        open_source(tmp_path / "t.csv.gz")
    (tmp_path / "u.csv.gz").write_bytes(gzip.compress(b"sequence,label\nA,b\n")[:-10])
    with pytest.raises(ValueError, match="whole gzip file"):
        open_source(tmp_path / "u.csv.gz")


def test_image_folder(tmp_path):
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/deep/3.jpg", "dog/notes.txt"):
        path = tmp_path / "plain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(0))
    source = open_source(tmp_path / "plain")
    assert isinstance(source, ImageFolder)
    assert list(source.ids) == ["cat/1.jpg", "cat/2.jpg", "dog/deep/3.jpg"]
    assert source.labels.spec.names == ("cat", "dog")
    assert source.left_out == "1 files that are no images by their names, or in no class, dog/notes.txt for one"
    (tmp_path / "plain" / "beside.jpg").write_bytes(jpeg(0))
    (tmp_path / "plain" / ".hidden").touch()
    assert open_source(tmp_path / "plain").left_out.startswith("2 files ")
    for name in ("train/cat/1.jpg", "val/cat/2.jpg", "test/dog/3.jpg"):
        path = tmp_path / "split" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(0))
    source = open_source(tmp_path / "split")
    assert dict(zip(source.ids, source.splits.tolist(), strict=True)) == {
        "test/dog/3.jpg": 2,
        "train/cat/1.jpg": 0,
        "val/cat/2.jpg": 1,
    }


def test_digits():
    digits = open_source()
    assert np.bincount(digits.splits).tolist() == [1259, 269, 269]
    assert [digits.load(index).points.shape[1] for index in (0, 1)] == [2, 2]
    third = open_source(options=SourceOptions(ink="coordinate")).load(0)
    assert third.points.shape == (35, 3)
    assert third.weights is None
    assert 0 < third.points[:, 2].min() <= third.points[:, 2].max() <= 1
    other = open_source(options=SourceOptions(seed=1))
    assert (other.splits != digits.splits).any()
    assert digits.describe()["index"] == open_source().describe()["index"]


def test_modelnet(tmp_path):
    root = tmp_path / "modelnet40_ply_hdf5_2048"
    root.mkdir()
    for part, count in (("train", 20), ("test", 4)):
        with h5py.File(root / f"ply_data_{part}0.h5", "w") as file:
            file["data"] = np.random.Generator(np.random.PCG64(0)).random((count, 2048, 3), dtype=np.float32)
            file["label"] = (np.arange(count) % 2).astype(np.uint8)[:, None]
        (root / f"{part}_files.txt").write_text(f"data/modelnet40_ply_hdf5_2048/ply_data_{part}0.h5\n")
    (root / "shape_names.txt").write_text("airplane\nbathtub\n")
    source = open_source(root)
    assert isinstance(source, ModelNet)
    assert np.bincount(source.splits).tolist() == [18, 2, 4]
    points = source.load(3).points
    assert points.shape == (512, 3)
    assert np.array_equal(points, open_source(root).load(3).points)
    assert not np.array_equal(points, open_source(root, options=SourceOptions(seed=1)).load(3).points)
    assert len(np.unique(points, axis=0)) == 512
    again = pickle.loads(pickle.dumps(source))  # as a worker receives it
    assert np.array_equal(again.load(3).points, points)
    (root / "ply_data_test0.h5").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"ply_data_test0\.h5.*download it again"):
        open_source(root)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"data": np.ones((4, 600, 3))}, "expected the arrays data and label but got ['data']"),
        ({"label": np.ones(4)}, "expected the arrays data and label but got ['label']"),
        ({"data": np.ones(4), "label": np.ones(4)}, "expected (4, ≥ 512, 3) points but got (4,)"),
        ({"data": np.ones((4, 600, 2)), "label": np.ones(4)}, "expected (4, ≥ 512, 3) points but got (4, 600, 2)"),
    ],
)
def test_a_modelnet_that_is_none_is_refused(tmp_path, arrays, message):
    for part in ("train", "test"):
        (tmp_path / f"{part}_files.txt").write_text("a.h5\n")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, values in arrays.items():
            file[name] = values
    with pytest.raises(ValueError, match=re.escape(f"a.h5: {message}")):
        open_source(tmp_path)
    (tmp_path / "test_files.txt").unlink()
    with pytest.raises(ValueError, match=r"ModelNet40's HDF5 folder but there is no test_files\.txt"):
        open_source(tmp_path, "modelnet")


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
def test_point_sets(tmp_path, suffix):
    values = np.arange(24, dtype=np.float32).reshape(12, 2)
    arrays = {"values": values, "ptr": np.array([0, 3, 4, 4, 12]), "labels": np.array([1, 0, 1, 0])}
    arrays |= {"weights": np.ones(12, dtype=np.float32)}
    path = tmp_path / f"sets{suffix}"
    if suffix == ".npz":
        np.savez(path, **arrays)
    else:
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file[name] = array
    source = open_source(path)
    assert isinstance(source, PointSets)
    assert (len(source), source.dim, source.has_weights) == (4, 2, True)
    assert np.array_equal(source.load(0).points, values[:3])
    assert open_source(path, options=SourceOptions(points=5)).load(3).points.shape == (5, 2)
    with pytest.raises(BadItemError, match="no points"):
        source.load(2)


def test_point_sets_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "evil.npz", points=np.array([[object()]], dtype=object))
    with pytest.raises(ValueError, match="plain arrays"):
        open_source(tmp_path / "evil.npz")
    np.savez(tmp_path / "other.npz", stuff=np.ones(3))
    with pytest.raises(ValueError, match="array named one of"):
        open_source(tmp_path / "other.npz")
    np.savez(tmp_path / "real.npz", points=np.ones((3, 2, 1)), y=np.array([0.5, 1.5, 2.5]))
    assert open_source(tmp_path / "real.npz").labels.spec.kind == "real"


def test_localization_tables(tmp_path):
    (tmp_path / "balanced.csv").write_text(
        "sequence,target,set,validation\nMKL,Nucleus,train,\nMK,Cytoplasm,train,True\nM,Nucleus,test,\n"
    )
    source = open_source(tmp_path / "balanced.csv")
    assert isinstance(source, Localization)
    assert source.splits.tolist() == [0, 1, 2]
    assert source.labels.spec.names == ("Cytoplasm", "Nucleus")
    (tmp_path / "deeploc.csv").write_text(
        "accession,sequence,label,partition\nP1,MKL,Nucleus,0\nP2,MK,Nucleus|Plastid,3\nP3,M,Plastid,4\n"
    )
    single = open_source(tmp_path / "deeploc.csv")
    assert (list(single.ids), single.splits.tolist()) == (["P1", "P3"], [0, 2])
    several = open_source(tmp_path / "deeploc.csv", options=SourceOptions(multi_label=True))
    assert several.labels.values.tolist() == [[1, 0], [1, 1], [0, 1]]
    assert several.splits.tolist() == [0, 1, 2]
    official = (
        "ACC,Kingdom,Partition,Membrane,Cytoplasm,Nucleus,Extracellular,Cell membrane,Mitochondrion,Plastid,"
        "Endoplasmic reticulum,Lysosome/Vacuole,Golgi apparatus,Peroxisome,Sequence\n"
        "P1,Metazoa,1.0,0.0,1.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,MKL\n"
    )
    (tmp_path / "own.csv").write_text(official)
    assert open_source(tmp_path / "own.csv").labels.spec.names == ("Cytoplasm",)
    (tmp_path / "bad.csv").write_text("sequence,label,split\nMK,a,someday\n")
    with pytest.raises(ValueError, match=r"bad\.csv, line 2: expected the split"):
        open_source(tmp_path / "bad.csv")
    (tmp_path / "short.csv").write_text("sequence,label,split\nMK,a\n")
    with pytest.raises(ValueError, match=r"short\.csv, line 2: expected 3 fields"):
        open_source(tmp_path / "short.csv")


def test_a_table_of_numbers_and_one_without_labels(tmp_path):
    (tmp_path / "t.csv").write_text("text,label,split\na,0.5|1,train\nb,-2|1e3,val\nc,,test\n")
    source = open_source(tmp_path / "t.csv", options=SourceOptions(label_kind="real"), strict=True)
    assert source.labels.values.tolist() == [[0.5, 1], [-2, 1000]]
    assert source.left_out == "1 of 3 items, which have no label"
    every = open_source(tmp_path / "t.csv", options=SourceOptions(label_kind="none"), strict=True)
    assert (every.labels.spec.kind, len(every), every.left_out) == ("none", 3, "")
    assert every.describe() != source.describe()
    (tmp_path / "bare.tsv").write_text("text\tid\na\tp\n")
    assert list(open_source(tmp_path / "bare.tsv", options=SourceOptions(label_kind="none")).ids) == ["p"]
    with pytest.raises(ValueError, match=r"bare\.tsv: expected a column 'target'.*--label-kind none"):
        open_source(tmp_path / "bare.tsv")
    with pytest.raises(ValueError, match="expected 'multilabel', since multi_label was asked for, but got 'real'"):
        open_source(tmp_path / "t.csv", options=SourceOptions(label_kind="real", multi_label=True))
    several, same = (SourceOptions(multi_label=True), SourceOptions(label_kind="multilabel"))
    described = [open_source(tmp_path / "t.csv", options=options).describe() for options in (several, same)]
    assert described[0] == described[1]


@pytest.mark.parametrize(
    ("label", "message"),
    [("x", "line 3: expected numbers as label but got 'x'"), ("1|2", "line 3: expected 1 numbers.*line 2, but got 2")],
)
def test_labels_that_are_no_numbers(tmp_path, label, message):
    (tmp_path / "t.csv").write_text(f"text,label\na,0.5\nb,{label}\n")
    with pytest.raises(ValueError, match=rf"t\.csv, {message}"):
        open_source(tmp_path / "t.csv", options=SourceOptions(label_kind="real"))


def test_splits_have_the_same_names_everywhere(tmp_path):
    names = ["train", "Training", "val", "dev", "valid", "testing"]
    np.savez(tmp_path / "sets.npz", points=np.ones((6, 2, 2)), splits=names)
    (tmp_path / "t.csv").write_text("text,label,split\n" + "".join(f"a,x,{name}\n" for name in names))
    (tmp_path / "p.fasta").write_text("".join(f">{number}\nMK\n" for number in range(6)))
    rows = "".join(f"{number},x,{name}\n" for number, name in enumerate(names))
    (tmp_path / "l.csv").write_text(f"id,label,split\n{rows}")
    for name in ("sets.npz", "t.csv", "p.fasta"):
        source = open_source(tmp_path / name, options=SourceOptions(labels=tmp_path / "l.csv"))
        assert source.splits.tolist() == [0, 0, 1, 1, 1, 2]
    (tmp_path / "l.csv").write_text("id,label,split\n3,x,someday\n")
    with pytest.raises(ValueError, match=r"l\.csv, id '3': expected the split to be one of .*'someday'"):
        Fasta(tmp_path / "p.fasta", tmp_path / "l.csv")


def test_fasta(tmp_path):
    (tmp_path / "p.fasta").write_text(">A first\nMK\nL\n>B\nMKK\n>C\nM\n")
    (tmp_path / "l.csv").write_text("id,label,split\nA,x,train\nC,y,test\n")
    source = open_source(tmp_path / "p.fasta", options=SourceOptions(labels=tmp_path / "l.csv"))
    assert isinstance(source, Fasta)
    assert (list(source.ids), source.load(0), source.splits.tolist()) == (["A", "C"], "MKL", [0, 2])
    assert open_source(tmp_path / "p.fasta").labels.values is None
    (tmp_path / "r.tsv").write_text("id\tlabel\nA\t0.5\nB\t1\nC\t2\n")
    real = Fasta(tmp_path / "p.fasta", tmp_path / "r.tsv", label_kind="real")
    assert real.labels.values.flatten().tolist() == [0.5, 1.0, 2.0]
    (tmp_path / "d.fasta").write_text(">A\nM\n>A\nK\n")
    with pytest.raises(ValueError, match="comes again"):
        Fasta(tmp_path / "d.fasta")
    (tmp_path / "n.fasta").write_text("MKL\n")
    with pytest.raises(ValueError, match=r"n\.fasta, line 1"):
        Fasta(tmp_path / "n.fasta")


def test_what_cannot_be_told(tmp_path):
    (tmp_path / "a.xyz").write_text("?")
    with pytest.raises(ValueError, match="--format"):
        open_source(tmp_path / "a.xyz")
    with pytest.raises(ValueError, match=r"does not end in \.zip, \.fasta.*TokenStore\.create"):
        open_source(tmp_path / "a.xyz")
    with pytest.raises(ValueError, match="none of that name"):
        open_source(tmp_path / "b.csv")
    with pytest.raises(ValueError, match="expected one path"):
        open_source([tmp_path / "a.xyz", tmp_path / "a.xyz"], "fasta")


@pytest.mark.assets
def test_the_real_data_sets(assets):
    tiny = open_source(sorted(assets.glob("tiny-imagenet-200.part*.zip")))
    assert len(tiny) == 110_000
    assert np.bincount(tiny.splits).tolist() == [90_000, 10_000, 10_000]
    assert np.bincount(tiny.labels.values.numpy()).tolist() == [550] * 200
    assert tiny.load(109_999).size == (64, 64)
    proteins = open_source(assets / "deeploc2_swissprot_5fold.csv.gz")
    assert len(proteins) == 21_619
    assert len(proteins.labels.spec.names) == 10
    assert (
        len(open_source(assets / "deeploc2_swissprot_5fold.csv.gz", options=SourceOptions(multi_label=True))) == 28_303
    )
    shapes = open_source(assets / "modelnet40_ply_hdf5_2048")
    assert len(shapes) == 1019 + 197
    assert shapes.load(0).points.shape == (512, 3)
