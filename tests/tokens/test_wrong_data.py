"""Data that would give a wrong result without a word is refused, with the file and the line."""

import io
import os
import zipfile

import numpy as np
import pytest

from cswe.tokens.errors import BadItemError
from cswe.tokens.labels import Labels
from cswe.tokens.sources import SourceOptions, open_source
from cswe.tokens.sources.fasta import Fasta

Image = pytest.importorskip("PIL.Image", reason="needs the extra 'data'")


def draw(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / name, "PNG")


def encoded(values, format):
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, format)
    return stream.getvalue()


@pytest.fixture
def splits(tmp_path):
    draw(tmp_path, *(f"{split}/{label}/1.png" for split in ("train", "val", "test") for label in ("cat", "dog")))
    return tmp_path


@pytest.mark.parametrize("name", [".ipynb_checkpoints/1.png", "__MACOSX/train/1.png", "annotations/"])
def test_folders_that_are_no_classes_are_passed_over(splits, name):
    before = open_source(splits).describe()
    if name.endswith("/"):
        (splits / name).mkdir()
    else:
        draw(splits, name, f"train/{name}", "val/cat/._1.png")
    source = open_source(splits)
    assert source.describe() == before
    assert (source.labels.spec.names, np.bincount(source.splits).tolist()) == (("cat", "dog"), [2, 2, 2])


def test_splits_beside_classes_are_refused_but_a_train_is_a_vehicle(splits, tmp_path):
    draw(splits, "extras/1.png")
    with pytest.raises(ValueError, match=r"got 'test' beside 'extras'; move .*extras elsewhere"):
        open_source(splits)
    draw(tmp_path / "vehicles", "car/1.png", "plane/1.png", "train/1.png")
    assert open_source(tmp_path / "vehicles").labels.spec.names == ("car", "plane", "train")


def test_a_name_that_cannot_be_written_down_is_told(tmp_path):
    draw(tmp_path, "a/1.png")
    try:
        os.rename(os.fsencode(tmp_path / "a/1.png"), os.fsencode(tmp_path / "a") + b"/\xe9.png")
    except OSError:
        pytest.skip("this file system takes no such names")
    with pytest.raises(ValueError, match=rf"{tmp_path}: expected names in UTF-8"):
        open_source(tmp_path)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_keeps_its_range(tmp_path, format):
    draw(tmp_path, "a/1.png")
    source = open_source(tmp_path)
    ramp = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    (tmp_path / "a/1.png").write_bytes(encoded(ramp, format))
    pixels = np.asarray(source.load(0)).astype(int)
    assert pixels.shape == (64, 64, 3)
    assert np.abs(pixels - (ramp / 257)[..., None]).max() <= 0.5


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_of_unknown_range_are_bad_items(tmp_path, dtype):
    draw(tmp_path, "a/1.png")
    (tmp_path / "a/1.png").write_bytes(encoded(np.ones((4, 4), dtype=dtype), "TIFF"))
    with pytest.raises(BadItemError, match="unknown range; save it with 8 or 16 bits"):
        open_source(tmp_path).load(0)


def test_parts_of_tiny_imagenet_are_all_needed_and_once(tmp_path):
    def part(name, *members):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for member in members:
                archive.writestr(f"tiny-imagenet-200/{member}", b"an image")
            archive.writestr("tiny-imagenet-200/val/val_annotations.txt", "val_0.JPEG\tn01\nval_1.JPEG\tn02\n")
        return tmp_path / name

    val = [f"val/images/val_{number}.JPEG" for number in (0, 1)]
    first, second = (part(f"{n}.zip", f"train/n0{n}/images/n0{n}_0.JPEG", val[n - 1]) for n in (1, 2))
    whole = part("whole.zip", "train/n01/images/n01_0.JPEG", *val)
    assert len(open_source([first, second])) == 4
    with pytest.raises(ValueError, match=r"every class of val but there are none of n02.*all parts"):
        open_source(whole)
    with pytest.raises(ValueError, match=r"every id once but 'train/n01/images/n01_0\.JPEG' comes again"):
        open_source([first, second, first])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sequence,label,split\n\n\nMK,a,train\n\nML,b,someday\n", "line 6: expected the split"),
        ('text,label\n"a\nb\nc",x\n"d"\n', "line 5: expected 2 fields but got 1"),
        ("sequence,label,partition\nMK,a,inf\n", "line 2: expected a partition number but got 'inf'"),
        ("id,sequence,label\np,MK,a\np,ML,b\n", "every id once but 'p' comes again"),
        ("sequence,label\nMK,é\n".encode("latin-1"), "expected text in UTF-8.*save it as UTF-8"),
        ("sequence,label\nMK,a\n".encode("utf-16"), "expected text in UTF-8.*save it as UTF-8"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, message):
    (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"t\.csv.*{message}"):
        open_source(tmp_path / "t.csv")


def test_a_field_may_be_long(tmp_path):
    (tmp_path / "t.csv").write_text(f"sequence,label\n{'A' * 200_000},a\n")
    assert len(open_source(tmp_path / "t.csv").load(0)) == 200_000


@pytest.mark.parametrize(
    ("table", "kind", "message"),
    [
        ("id,label\nA,x\nB,\n", "class", "a label for every id but 'B' has none"),
        ("id,label\nA,x\nB,y\nA,y\n", "class", "line 4: expected every id once but 'A' comes again"),
        ("id,label\nA,1\nB,nan\n", "real", "finite numbers"),
    ],
)
def test_wrong_labels_of_sequences_are_refused(tmp_path, table, kind, message):
    (tmp_path / "p.fasta").write_text(">A\nMK\n>B\nML\n")
    (tmp_path / "l.csv").write_text(table)
    with pytest.raises(ValueError, match=rf"l\.csv.*{message}"):
        Fasta(tmp_path / "p.fasta", tmp_path / "l.csv", label_kind=kind)


def test_choices_that_do_not_matter_are_refused_where_a_person_made_them(tmp_path):
    np.savez(tmp_path / "sets.npz", points=np.ones((20, 2, 2)))
    options = SourceOptions(multi_label=True)
    assert len(open_source(tmp_path / "sets.npz", options=options)) == 20  # those of a model, say
    with pytest.raises(ValueError, match=r"multi_label: .* the format point-sets has no use for it"):
        open_source(tmp_path / "sets.npz", options=options, strict=True)


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8", "i4"])
def test_class_numbers_of_every_whole_type(kind):
    labels = Labels.classes(np.array([0, 2, 1], kind))
    assert labels.values.tolist() == [0, 2, 1]
    assert Labels.classes([]).values.tolist() == []
    with pytest.raises(ValueError, match="class numbers below 2 but got 2"):
        Labels.classes(np.array([0, 2, 1], kind), ["a", "b"])
