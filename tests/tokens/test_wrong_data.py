"""Data that would give a wrong result without a word is refused, with the file and the line."""

import gzip
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


def test_folders_may_be_links(tmp_path):
    draw(tmp_path / "elsewhere", "cat/1.png", "dog/1.png")
    draw(tmp_path / "data", "val/cat/2.png", "val/dog/2.png")
    (tmp_path / "data/train").mkdir()
    for label in ("cat", "dog"):
        (tmp_path / "data/train" / label).symlink_to(tmp_path / "elsewhere" / label)
    (tmp_path / "data/val/cat/more").symlink_to(tmp_path / "elsewhere/cat")
    (tmp_path / "data/val/cat/back").symlink_to(tmp_path / "data")  # a circle
    source = open_source(tmp_path / "data")
    assert source.ids == ["train/cat/1.png", "train/dog/1.png", "val/cat/2.png", "val/cat/more/1.png", "val/dog/2.png"]
    assert source.splits.tolist() == [0, 0, 1, 1, 1]


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


def test_colours_without_a_palette_are_a_bad_item(tmp_path):
    draw(tmp_path, "a/1.png")
    stream = io.BytesIO()
    Image.new("P", (4, 4)).save(stream, "PNG", transparency=0)
    data = stream.getvalue()
    palette = data.index(b"PLTE") - 4
    size = int.from_bytes(data[palette : palette + 4], "big")
    (tmp_path / "a/1.png").write_bytes(data[:palette] + data[palette + 12 + size :])
    with pytest.raises(BadItemError, match="is not an image that can be read"):
        open_source(tmp_path).load(0)


VAL = "val_0.JPEG\tn01\nval_1.JPEG\tn02\n"


def zipped(file, annotations=VAL, *, top="tiny-imagenet-200/", also=()):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in also:
            archive.writestr(name, b"")
        for number in (0, 1):
            archive.writestr(f"{top}train/n0{number + 1}/images/n0{number + 1}_0.JPEG", b"an image " * 50)
            archive.writestr(f"{top}val/images/val_{number}.JPEG", b"an image " * 50)
        archive.writestr(f"{top}val/val_annotations.txt", annotations)
    return file


def test_a_zip_may_be_laid_out_in_many_ways(tmp_path):
    ids = open_source(zipped(tmp_path / "usual.zip")).ids
    assert open_source(zipped(tmp_path / "dot.zip", also=["./"])).ids == ids
    assert open_source(zipped(tmp_path / "top.zip", top="my-train/tiny/")).ids == ids
    assert open_source(zipped(tmp_path / "lines.zip", f"\n{VAL}\n\n")).ids == ids


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        (
            VAL.replace("\t", " "),
            r"line 1: expected an image and its class, a tab between them, but got 'val_0.JPEG n01'",
        ),
        (f"{VAL}é".encode("latin-1"), "codec can't decode"),
    ],
)
def test_wrong_annotations_are_refused(tmp_path, annotations, message):
    with pytest.raises(ValueError, match=rf"t\.zip.*val_annotations\.txt.*{message}"):
        open_source(zipped(tmp_path / "t.zip", annotations))


@pytest.mark.parametrize("fault", ["packed", "encrypted"])
def test_members_that_cannot_be_unpacked_are_bad_items(tmp_path, fault):
    def spoil(file, name):
        with zipfile.ZipFile(file) as archive:
            member = next(member for member in archive.infolist() if member.filename.endswith(name))
        data = bytearray(file.read_bytes())
        if fault == "packed":
            start = member.header_offset + 30 + len(member.filename)
            data[start : start + member.compress_size] = b"\xff" * member.compress_size
        else:  # the flag, which stands in the header of the member and in the directory
            data[member.header_offset + 6] |= 1
            data[data.index(member.filename.encode(), data.index(b"PK\x01\x02")) - 46 + 8] |= 1
        file.write_bytes(data)
        return file

    source = open_source(spoil(zipped(tmp_path / "image.zip"), "n01_0.JPEG"))
    with pytest.raises(BadItemError, match=r"cannot be read from its archive|is encrypted"):
        source.load(0)
    with pytest.raises(ValueError, match=r"text\.zip.*val_annotations\.txt: (cannot be read|is encrypted)"):
        open_source(spoil(zipped(tmp_path / "text.zip"), "val_annotations.txt"))


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
        ("text,label,Label\na,x,y\n", "expected every column name once but 'label' comes again"),
        ('label,sequence\na,MK\nb,"ML\na,MM\n', "line 3: expected a closing quotation mark but the file ends"),
        ('label,sequence\na,MK\nb,"', "line 3: expected a closing quotation mark but the file ends"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, message):
    (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"t\.csv.*{message}"):
        open_source(tmp_path / "t.csv")


@pytest.mark.parametrize("end", ["", "\n", "\r\n\r\n"])
def test_a_quoted_field_may_end_a_table(tmp_path, end):
    (tmp_path / "t.csv").write_bytes(f'label,sequence\na,"MK\n"\nb,"M""L"{end}'.encode())
    source = open_source(tmp_path / "t.csv")
    assert ([source.load(index) for index in range(2)], len(source)) == (["MK", 'M"L'], 2)


def test_a_packed_table_that_cannot_be_unpacked_is_refused(tmp_path):
    data = bytearray(gzip.compress("\n".join(["sequence,label", *(f"MK{row},a" for row in range(400))]).encode()))
    data[10] = 0xFF  # the first byte that is packed: of no known way to pack
    (tmp_path / "t.csv.gz").write_bytes(data)
    with pytest.raises(ValueError, match=r"t\.csv\.gz: expected a whole gzip file but .*download it again"):
        open_source(tmp_path / "t.csv.gz")


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


def test_labels_without_a_sequence_are_told(tmp_path):
    (tmp_path / "p.fasta").write_text(">A\nMK\n>B\nML\n")
    (tmp_path / "l.csv").write_text("id,label\nA,x\nB,y\nC,y\n")
    assert Fasta(tmp_path / "p.fasta", tmp_path / "l.csv").left_out.startswith("1 of 3 rows of ")
    (tmp_path / "l.csv").write_text("id,label\nA,x\nC,y\n")
    told = Fasta(tmp_path / "p.fasta", tmp_path / "l.csv").left_out
    assert told.startswith("1 of 2 sequences, which ")
    assert "; 1 of 2 rows of " in told


def test_choices_that_do_not_matter_are_refused_where_a_person_made_them(tmp_path):
    np.savez(tmp_path / "sets.npz", points=np.ones((20, 2, 2)))
    options = SourceOptions(multi_label=True)
    assert len(open_source(tmp_path / "sets.npz", options=options)) == 20  # those of a model, say
    with pytest.raises(ValueError, match=r"multi_label: .* the format point-sets has no use for it"):
        open_source(tmp_path / "sets.npz", options=options, strict=True)
    with pytest.raises(ValueError, match=r"data: expected none, since the format is digits, but got .*sets\.npz"):
        open_source(tmp_path / "sets.npz", "digits")
    (tmp_path / "p.fasta").write_text(">A\nMK\n")
    with pytest.raises(ValueError, match=r"label_kind: .* the format fasta without labels has no use for it"):
        open_source(tmp_path / "p.fasta", options=SourceOptions(label_kind="real"), strict=True)


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8", "i4"])
def test_class_numbers_of_every_whole_type(kind):
    labels = Labels.classes(np.array([0, 2, 1], kind))
    assert labels.values.tolist() == [0, 2, 1]
    assert Labels.classes([]).values.tolist() == []
    with pytest.raises(ValueError, match="class numbers below 2 but got 2"):
        Labels.classes(np.array([0, 2, 1], kind), ["a", "b"])
