"""Embedding, neighbours and explanations, from Python and from the command line."""

import csv
import json

import numpy as np
import pytest
import torch

import cswe
from cswe.cli import main
from cswe.tokens import Item, TokenStore
from cswe.training.embed import embed
from cswe.training.explain import Explanation, explain, position, write_explanation
from cswe.training.inputs import StoreInput, open_input
from cswe.training.model import Facts, Model
from cswe.training.neighbors import _least, nearest
from cswe.training.outputs import open_writer
from cswe.training.recipes import recipe


def anonymous_memory():
    """Bytes of this process that belong to no file: memory-mapped shards do not count."""
    with open("/proc/self/status") as stream:
        lines = dict(line.split(":", 1) for line in stream)
    return int(lines["RssAnon"].split()[0]) * 1024


@pytest.fixture(scope="module")
def vectors(trained, digits, tmp_path_factory):
    out = tmp_path_factory.mktemp("vectors") / "vectors.npy"
    assert main(["embed", str(trained), str(digits), "--out", str(out), "--quiet"]) == 0
    return np.load(out)


def test_vectors_are_those_of_the_model(trained, digits, vectors):
    model, store = cswe.load(trained), TokenStore(digits)
    assert vectors.shape == (240, model.size) == (240, 16)
    assert vectors.dtype == np.float32
    for index in (0, 100, 239):
        item = store[index]
        one = model.embed(item.tokens.float()[None], weights=item.weights[None]).detach()[0]
        np.testing.assert_allclose(vectors[index], one, rtol=1e-4, atol=1e-5)


def test_every_format_holds_the_same(trained, digits, vectors, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'data'")
    h5py = pytest.importorskip("h5py", reason="needs the extra 'data'")
    ids = TokenStore(digits).ids
    for suffix in ("parquet", "h5", "npy"):
        out = tmp_path / f"vectors.{suffix}"
        assert main(["embed", str(trained), str(digits), "--out", str(out), "--quiet"]) == 0
    assert (tmp_path / "vectors.ids.txt").read_text().splitlines() == ids
    table = pq.read_table(tmp_path / "vectors.parquet")
    assert table["id"].to_pylist() == ids
    assert np.array_equal(np.array(table["vector"].to_pylist(), dtype=np.float32), vectors)
    with h5py.File(tmp_path / "vectors.h5") as file:
        assert np.array_equal(file["vectors"][:], vectors)
        assert [name.decode() for name in file["ids"][:]] == ids
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "vectors.h5",
        "vectors.ids.txt",
        "vectors.npy",
        "vectors.parquet",
    ]


def test_a_split_alone(trained, digits, vectors, tmp_path):
    out = tmp_path / "test.npy"
    assert main(["embed", str(trained), str(digits), "--split", "test", "--out", str(out), "--quiet"]) == 0
    np.testing.assert_allclose(np.load(out), vectors[TokenStore(digits).split("test")], rtol=1e-4, atol=1e-5)


def test_raw_input_gives_what_extract_and_embed_give(trained, tmp_path):
    """All 1,797 digits, while the model saw 240: groups and batches of an extraction end elsewhere than its shards."""
    pytest.importorskip("sklearn", reason="needs the extra 'data'")
    store = tmp_path / "store"
    assert main(["extract", "--out", str(store), "--quiet", "--shard-mib", "0.05"]) == 0
    for source, out in ((str(store), "stored.npy"), ("digits", "raw.npy")):
        arguments = ["--out", str(tmp_path / out), "--batch-size", "100", "--quiet"]
        assert main(["embed", str(trained), source, *arguments]) == 0
    stored, raw = np.load(tmp_path / "stored.npy"), np.load(tmp_path / "raw.npy")
    assert np.array_equal(stored, raw)
    assert (tmp_path / "raw.ids.txt").read_text() == (tmp_path / "stored.ids.txt").read_text()


def test_an_interrupted_embedding_leaves_no_half_file(trained, digits, tmp_path):
    model = cswe.load(trained)

    class Broken(StoreInput):
        def batches(self, batch_size, device):
            yield from list(super().batches(batch_size, device))[:2]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed(model, Broken(TokenStore(digits)), tmp_path / "vectors.npy", batch_size=50)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_a_full_disk_leaves_the_old_vectors(trained, digits, tmp_path, full_disk, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="needs the extra 'data'")
    (tmp_path / f"vectors.{suffix}").write_text("old")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        embed(cswe.load(trained), StoreInput(TokenStore(digits)), tmp_path / f"vectors.{suffix}")
    assert [path.name for path in tmp_path.iterdir()] == [f"vectors.{suffix}"]
    assert (tmp_path / f"vectors.{suffix}").read_text() == "old"


@pytest.mark.parametrize(
    ("out", "folder"), [("v.npy", "v.npy"), ("v.npy", "v.ids.txt"), ("v.parquet", "v.parquet"), ("v.h5", "v.h5")]
)
def test_a_folder_in_the_way_is_told_before_anything_is_computed(trained, tmp_path, out, folder):
    (tmp_path / folder).mkdir()
    with pytest.raises(ValueError, match=f"{folder} is a folder; choose another name"):
        embed(cswe.load(trained), None, tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("suffix", ["npy", "parquet", "h5"])
def test_memory_is_flat_while_input_grows_tenfold(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("cswe.training.outputs._BLOCK", 2**20)  # small enough for the small input to fill one
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="needs the extra 'data'")
    if suffix == "h5":
        pytest.importorskip("h5py", reason="needs the extra 'data'")
    generator = torch.Generator().manual_seed(0)

    def items(count):
        for number in range(count):
            yield Item(torch.randn(4, 8, generator=generator), id=f"{number}", label=0)

    stores = {
        count: TokenStore.create(tmp_path / str(count), items(count), classes=["a"], shard_bytes=2**17)
        for count in (800, 8_000)
    }
    model = Model(Facts(recipe("digits", slices=1024).with_(pool="moments"), stores[800].spec, 0, 1))
    peaks = {}
    for count, store in [(800, stores[800]), *stores.items()]:  # the first one warms up
        peak = 0

        class Watched(StoreInput):
            def batches(self, batch_size, device):
                nonlocal peak
                for batch in super().batches(batch_size, device):
                    peak = max(peak, anonymous_memory())
                    yield batch

        assert embed(model, Watched(store), tmp_path / f"out.{suffix}") == count
        peaks[count] = peak
    # All vectors are 8,000 · 4,096 · 4 bytes = 131 MB, all tokens 0.5 MB; the allocator keeps some tens of them.
    assert peaks[8_000] - peaks[800] < 60e6


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_neighbours_are_exact(metric):
    sklearn = pytest.importorskip("sklearn.neighbors", reason="needs the extra 'data'")
    vectors = torch.randn(203, 9, generator=torch.Generator().manual_seed(0))
    queries = vectors[::20]
    search = sklearn.NearestNeighbors(n_neighbors=7, metric=metric, algorithm="brute").fit(vectors)
    expected, places = search.kneighbors(queries)
    for size in (1, 10, 203):
        distances, found = nearest(queries, vectors.split(size), 7, metric)
        assert np.array_equal(found, places)
        np.testing.assert_allclose(distances, expected, atol=1e-6)
    _, found = nearest(queries, vectors.split(10), 6, metric, skip=torch.arange(0, 203, 20))
    assert np.array_equal(found, places[:, 1:])


def test_equal_distances_come_in_order_and_few_vectors_are_enough():
    vectors = torch.ones(5, 3)
    _, found = nearest(torch.ones(2, 3), vectors.split(2), 3)
    assert found.tolist() == [[0, 1, 2]] * 2
    assert nearest(torch.ones(1, 3), vectors.split(2), 9, skip=torch.tensor([2]))[1].tolist() == [[0, 1, 3, 4]]


@pytest.mark.parametrize("k", [1, 4, 50])
def test_the_least_are_those_of_a_stable_sort(k):
    generator = torch.Generator().manual_seed(k)
    values = torch.randint(0, 40, (64, 30), generator=generator).double()  # most rows have equals, some among the least
    values[0], values[1, 3], values[2, :28] = 1.0, torch.inf, torch.nan
    sure = torch.rand(64, 30, generator=generator, dtype=torch.float64)
    for rows in (values, sure):
        expected = rows.sort(dim=1, stable=True)
        for found, wanted in zip(_least(rows, k), expected, strict=True):
            assert torch.equal(found.nan_to_num(-1.0), wanted[:, :k].nan_to_num(-1.0))


def test_neighbours_from_the_command_line(trained, digits, vectors, capsys):
    arguments = ["neighbors", str(trained), str(digits), "--query", "digit-0004", "7", "--k", "3"]
    assert main([*arguments, "--metric", "euclidean", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    distances = np.linalg.norm(vectors - vectors[4], axis=1)
    expected = [f"digit-{place:04d}" for place in np.argsort(distances)[1:4]]
    assert [row["id"] for row in told["digit-0004"]] == expected
    assert told["digit-0007"][0]["label"] in {str(n) for n in range(10)}
    assert main([*arguments, "--split", "test"]) == 0
    assert "digit-0004\n" in capsys.readouterr().out


@pytest.fixture
def repeated(tmp_path, tiny):
    """A store of pairs of items with one id, and a run on it."""
    items = [
        Item(torch.randn(4, 3), n % 2, f"pair {n // 2}", ("train", "train", "validation", "validation")[n % 4])
        for n in range(24)
    ]
    store = TokenStore.create(tmp_path / "store", items)
    assert main(["train", str(store.path), "--out", str(tmp_path / "run"), *tiny, "--pool", "mean"]) == 0
    return str(tmp_path / "run"), str(store.path)


def test_items_with_the_same_id_are_told_apart(repeated, tmp_path, capsys):
    capsys.readouterr()
    for command in (
        ("neighbors", "--query", "pair 3"),
        ("explain", "--item", "pair 3", "--out", str(tmp_path / "x.csv")),
    ):
        assert main([command[0], *repeated, *command[1:]]) == 2
        said = capsys.readouterr().err
        assert (
            "expected an id of one item but 2 are called 'pair 3'; ask for one of them by its position (6, 7)" in said
        )
    assert main(["neighbors", *repeated, "--query", "6", "7", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["pair 3 (position 6)", "pair 3 (position 7)"]
    for own, rows in zip((6, 7), told.values(), strict=True):
        assert own not in {row["position"] for row in rows}
        assert all(row["id"] == f"pair {row['position'] // 2}" for row in rows)
    assert main(["neighbors", *repeated, "--query", "6", "--k", "30"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("pair 3 (position 6)\n")
    assert "  pair 0 (position 1)  1\n" in printed


def test_a_number_is_a_position_and_text_an_id_first(repeated):
    store = TokenStore(repeated[1])
    store.ids = [str(23 - n) for n in range(24)]
    sets = StoreInput(store)
    assert [position(sets, item) for item in (4, np.int64(4), "4")] == [4, 4, 19]


def test_a_split_without_items_is_told(repeated, tmp_path, capsys):
    capsys.readouterr()
    for command in (
        ("neighbors", "--query", "0"),
        ("embed", "--out", str(tmp_path / "v.npy")),
        ("evaluate",),
    ):
        assert main([command[0], *repeated, *command[1:], "--split", "test"]) == 2
        said = capsys.readouterr().err
        assert (
            f"split: expected one that has items, which in {repeated[1]} are train, validation, but got 'test'" in said
        )
    assert not list(tmp_path.glob("v.*"))


def test_vectors_that_are_no_blocks_are_told():
    vectors = torch.randn(10, 3)
    for queries, blocks, said in (
        (vectors[:2], vectors, r"blocks: expected vectors \(n, 3\) in blocks.* got a block of shape \(3,\)"),
        (vectors[:2], torch.randn(10, 4).split(4), r"got a block of shape \(4, 4\)"),
        (vectors[0], vectors.split(4), r"queries: expected vectors \(Q, size\) but got shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=said):
            nearest(queries, blocks, 2)


def test_labels_of_neighbours_are_of_their_kind(make_store, tmp_path, tiny, capsys):
    kinds = {
        "real": ([[float(n % 3), 0.0] for n in range(24)], ["height", "weight"]),
        "multilabel": ([[n % 2, 1] for n in range(24)], ["a", "b"]),
    }
    for kind, (labels, names) in kinds.items():
        store = make_store(tmp_path / kind, labels, kind=kind, classes=names)
        run = str(tmp_path / f"{kind}-run")
        assert main(["train", str(store.path), "--out", run, *tiny, "--pool", "mean"]) == 0
        capsys.readouterr()
        assert main(["neighbors", run, str(store.path), "--query", "0", "--json"]) == 0
        for row in json.loads(capsys.readouterr().out)["item 0"]:
            label = labels[int(row["id"].split()[1])]
            given = [name for name, there in zip(names, label, strict=True) if there]
            assert row["label"] == (given if kind == "multilabel" else label)


def test_an_id_is_one_line_for_every_reader(tmp_path):
    names = ["a\r\nb", "c\u2028d", "e\x85f", "größe"]
    with open_writer(tmp_path / "v.npy", 2) as writer:
        writer.write(np.zeros((4, 2), dtype=np.float32), names)
    text = (tmp_path / "v.ids.txt").read_text(encoding="utf-8")
    assert text.splitlines() == ["a  b", "c d", "e f", "größe"]


def test_explanations_of_a_point_set(trained, digits, tmp_path, capsys):
    model = cswe.load(trained)
    for source in ("digits", str(digits)):
        out = tmp_path / "four.csv"
        assert main(["explain", str(trained), source, "--item", "digit-0004", "--label", "4", "--out", str(out)]) == 0
        with out.open() as stream:
            rows = list(csv.DictReader(stream))
        assert set(rows[0]) == {"position", "x", "y", "share"}
        item = TokenStore(digits)[4]
        logit = model(item.tokens.float()[None], weights=item.weights[None])[0, 4] - model.head.bias[4]
        assert sum(float(row["share"]) for row in rows) == pytest.approx(float(logit.detach()), abs=1e-3)
    assert "the evidence for '4'" in capsys.readouterr().out
    ply = tmp_path / "four.ply"
    assert main(["explain", str(trained), "digits", "--item", "4", "--slice", "1", "--out", str(ply)]) == 0
    lines = ply.read_text().splitlines()
    assert lines[0] == "ply"
    assert f"element vertex {len(rows)}" in lines
    assert len(lines) == lines.index("end_header") + 1 + len(rows)
    assert main(["explain", str(trained), "digits", "--item", "4", "--out", str(tmp_path / "four.png")]) == 2
    assert "expected images" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["csv", "ply", "png"])
def test_a_full_disk_leaves_the_old_explanation(tmp_path, full_disk, suffix):
    image = pytest.importorskip("PIL.Image", reason="needs the extra 'data'")
    told = Explanation("x", "something", torch.ones(4), torch.ones(4, 2), image.new("RGB", (8, 8)), (2, 2))
    out = tmp_path / f"four.{suffix}"
    write_explanation(told, out)
    before = out.read_bytes()
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_explanation(told, out)
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == before


@pytest.mark.parametrize("normalization", ["none", "batch", "layer"])
@pytest.mark.parametrize("pool", ["mean", "max", "moments", "swe"])
def test_shares_are_complete_with_every_normalisation(digits, pool, normalization):
    store = TokenStore(digits)
    chosen = recipe("digits", slices=4).with_(pool=pool, normalization=normalization)
    torch.manual_seed(0)
    model = Model(Facts(chosen, store.spec, 0, 10)).eval()
    item = store[4]
    tokens, weights = item.tokens.float()[None], item.weights[None]
    if normalization == "batch":
        model.normalization.running_mean.copy_(model.embed(tokens, weights=weights)[0].detach() / 2)
    told = explain(model, StoreInput(store), 4, label="7")
    evidence = float(model(tokens, weights=weights)[0, 7].detach() - model.head.bias[7].detach())
    assert abs(evidence) > 1e-3
    assert float(told.shares.sum()) == pytest.approx(evidence, abs=1e-5)
    assert told.of == "the evidence for '7'"
    assert torch.equal(explain(model, StoreInput(store), 4, label=7).shares, told.shares)


def test_shares_that_are_no_more_than_gradients_say_so(digits):
    store = TokenStore(digits)
    for choices in ({"pool": "attention"}, {"pool": "pma"}, {"pool": "wasserstein"}, {"pool": "mean", "head": "mlp"}):
        model = Model(Facts(recipe("digits").with_(**choices), store.spec, 0, 10))
        told = explain(model, StoreInput(store), 4, label="7")
        assert told.of == "the evidence for '7', to first order (gradient times token)"


def test_input_like_the_training_set_is_asked_for(trained, tmp_path):
    facts = cswe.load(trained).facts
    np.savez(tmp_path / "sets.npz", points=np.zeros((3, 4, 2), dtype=np.float32))
    with pytest.raises(ValueError, match="which had weights"):
        open_input(tmp_path / "sets.npz", facts)
