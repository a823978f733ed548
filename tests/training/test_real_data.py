"""On real tokens: proteins through ESM-2, images through DeiT."""

import csv
import gzip
import json

import numpy as np
import pytest

import cswe
from cswe.cli import main
from cswe.tokens import TokenStore

pytestmark = pytest.mark.assets
QUICK = ["--slices", "4", "--points", "16", "--epochs", "3", "--lr", "3e-3", "--device", "cpu", "--quiet"]


@pytest.fixture(scope="module")
def esm(assets):
    pytest.importorskip("transformers", reason="needs the extra 'data'")
    return str(assets / "esm2_t6_8M_hemolysis")


@pytest.fixture(scope="module")
def proteins(assets, esm, tmp_path_factory):
    out = tmp_path_factory.mktemp("proteins") / "store"
    table = out.with_name("some.csv")
    with gzip.open(assets / "deeploc2_swissprot_5fold.csv.gz", "rt") as stream:
        head, *lines = stream  # sorted by partition: a few of each
    table.write_text("".join([head, *lines[::70]]))
    cut = ["--max-length", "80", "--quiet", "--device", "cpu"]
    assert main(["extract", "--out", str(out), "--data", str(table), "--backbone", esm, *cut]) == 0
    return out


@pytest.mark.filterwarnings("ignore::cswe.training.data.MissingClassWarning")
@pytest.mark.parametrize("pool", ["cswe", "swe", "mean"])
def test_deeploc_from_end_to_end(proteins, tmp_path, capsys, pool):
    run = tmp_path / "run"
    arguments = ["--recipe", "proteins", "--pool", pool, *QUICK]
    assert main(["train", str(proteins), "--out", str(run), *arguments]) == 0
    lines = (run / "log.jsonl").read_text().splitlines()
    first, last = (json.loads(line) for line in (lines[0], lines[-1]))
    assert len(TokenStore(proteins)) > 250
    assert last["loss"] < first["loss"]
    assert (pool == "cswe") == ("swgg" in last)
    capsys.readouterr()
    assert main(["evaluate", str(run), str(proteins)]) == 0
    assert "top1" in capsys.readouterr().out
    assert main(["embed", str(run), str(proteins), "--out", str(tmp_path / "v.npy"), "--quiet"]) == 0
    assert np.load(tmp_path / "v.npy").shape == (len(TokenStore(proteins)), cswe.load(run).size)


def test_residues_and_raw_sequences(assets, esm, proteins, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", str(proteins), "--out", str(run), "--recipe", "proteins", *QUICK, "--epochs", "1"]) == 0
    with gzip.open(assets / "deeploc2_swissprot_5fold.csv.gz", "rt") as stream:
        rows = [row for row, _ in zip(csv.DictReader(stream), range(6), strict=False)]
    texts = [row.get("sequence") or row["Sequence"] for row in rows]
    fasta = tmp_path / "some.fasta"
    fasta.write_text("".join(f">p{number}\n{text}\n" for number, text in enumerate(texts)))
    bare = tmp_path / "bare.csv"  # no labels are needed, since none are looked at
    bare.write_text("".join(f"{line}\n" for line in ("sequence", *texts)))
    extract = ["--backbone", esm, "--max-length", "80", "--quiet", "--device", "cpu"]
    assert main(["extract", "--out", str(tmp_path / "some"), "--data", str(fasta), *extract]) == 0
    model = ["--backbone", esm]
    for source, out, more in ((tmp_path / "some", "stored", []), (fasta, "raw", model), (bare, "bare", model)):
        arguments = ["embed", str(run), str(source), "--out", str(tmp_path / f"{out}.npy"), "--quiet", *more]
        assert main([*arguments, "--device", "cpu"]) == 0, capsys.readouterr().err
    vectors = [np.load(tmp_path / f"{name}.npy") for name in ("stored", "raw", "bare")]
    assert np.array_equal(vectors[0], vectors[1])
    assert np.array_equal(vectors[0], vectors[2])
    table = tmp_path / "residues.csv"
    item = ["--item", "p2", "--label", "Nucleus", "--out", str(table), "--backbone", esm, "--device", "cpu"]
    assert main(["explain", str(run), str(fasta), *item]) == 0
    with table.open() as stream:
        told = list(csv.DictReader(stream))
    assert "".join(row["residue"] for row in told) == texts[2][:80]
    model, store = cswe.load(run), TokenStore(tmp_path / "some")
    number = model.facts.labels.names.index("Nucleus")
    logit = model(store[2].tokens.float()[None])[0, number] - model.head.bias[number]
    assert sum(float(row["share"]) for row in told) == pytest.approx(float(logit.detach()), abs=1e-2)


def test_a_heat_map_over_an_image(assets, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs the extra 'data'")
    pytest.importorskip("transformers", reason="needs the extra 'data'")
    random = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(random.normal(colour, 20, (48, 64, 3)), 0, 255).astype(np.uint8)
                image.fromarray(pixels).save(folder / f"{number}.png")
    deit = str(assets / "deit-tiny-patch16-224")
    store, run = tmp_path / "store", tmp_path / "run"
    extract = ["--data", str(tmp_path / "pictures"), "--backbone", deit, "--quiet", "--device", "cpu"]
    assert main(["extract", "--out", str(store), *extract, "--workers", "0"]) == 0
    assert main(["train", str(store), "--out", str(run), *QUICK, "--batch-size", "4"]) == 0
    item = TokenStore(store).ids[0]
    for suffix in ("png", "csv"):
        out = tmp_path / f"heat.{suffix}"
        more = ["--backbone", deit, "--device", "cpu", "--label", "red"]
        assert main(["explain", str(run), str(tmp_path / "pictures"), "--item", item, "--out", str(out), *more]) == 0
    assert image.open(tmp_path / "heat.png").size == (224, 224)
    with (tmp_path / "heat.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 196
    assert set(rows[0]) == {"position", "row", "column", "share"}
