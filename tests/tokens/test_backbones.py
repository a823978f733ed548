"""Backbones give what the models themselves give."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cswe.tokens import TokenStore, TokenStoreError
from cswe.tokens.backbones import BackboneOptions, open_backbone
from cswe.tokens.backbones.hf_vision import VisionBackbone
from cswe.tokens.backbones.image_preparer import ImagePreparer, ImageRecipe
from cswe.tokens.backbones.pct import PCT, PointCloudTransformer
from cswe.tokens.backbones.resize import BICUBIC, BILINEAR, LANCZOS, enlarge_images
from cswe.tokens.extract import extract
from cswe.tokens.labels import Labels
from cswe.tokens.sources import Points, open_source
from cswe.tokens.sources.localization import SequenceSource

os.environ.setdefault("HF_HUB_OFFLINE", "1")
Image = pytest.importorskip("PIL.Image", reason="needs the extra 'data'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'data'")


@pytest.mark.parametrize("resample", [BICUBIC, BILINEAR, LANCZOS])
@pytest.mark.parametrize(("size", "target"), [((64, 64), (224, 224)), ((50, 33), (97, 120)), ((31, 44), (31, 120))])
def test_enlarging_is_pillows_to_the_bit(size, target, resample):
    pixels = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (*size, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(pixels).resize(target[::-1], resample)).astype(np.int64)
    found = enlarge_images(torch.from_numpy(pixels).permute(2, 0, 1)[None], *target, resample)[0].permute(1, 2, 0)
    assert np.array_equal(found.numpy().astype(np.int64), expected)


@pytest.mark.parametrize(
    "config",
    [
        {"size": {"height": 32, "width": 32}},
        {"size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
        {"size": 36, "do_center_crop": True, "crop_size": 32, "resample": 2},
    ],
)
def test_small_and_large_images_are_prepared_alike(config):
    recipe = ImageRecipe.from_config(config, (32, 32))
    preparer = ImagePreparer(recipe)
    images = [
        Image.fromarray(np.random.Generator(np.random.PCG64(n)).integers(0, 256, (*size, 3), dtype=np.uint8))
        for n, size in enumerate([(20, 20), (20, 30), (32, 32), (100, 80), (20, 20), (33, 31)])
    ]
    found = preparer.assemble([preparer.pack([preparer.one(image) for image in images])], torch.device("cpu"))
    for image, pixels in zip(images, found, strict=True):
        height, width = recipe.resized(image.height, image.width)
        whole = np.asarray(image.resize((width, height), recipe.resample), dtype=np.float32)
        top, left = (height - 32) // 2, (width - 32) // 2
        expected = torch.from_numpy(whole[top : top + 32, left : left + 32].copy()).permute(2, 0, 1) / 255
        expected = (expected - torch.tensor(recipe.mean)[:, None, None]) / torch.tensor(recipe.std)[:, None, None]
        assert torch.allclose(pixels, expected, atol=1e-5)


@pytest.fixture(scope="module")
def vit(assets):
    return str(assets / "deit-tiny-patch16-224")


@pytest.fixture(scope="module")
def images(assets):
    return open_source(sorted(assets.glob("tiny-imagenet-200.part*.zip")))


@pytest.mark.assets
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2)])
def test_the_models_own_logits_from_the_stored_cls(vit, images, tmp_path, dtype, tolerance):
    backbone = open_backbone(vit, images, BackboneOptions(layers=(6, 12), device="cpu"))
    store = extract(images, backbone, tmp_path, dtype=dtype, limit=6, progress=False, workers=0)
    assert store.layers == [6, 12]
    assert store.lengths.tolist() == [196] * 6
    model = transformers.ViTForImageClassification.from_pretrained(vit, dtype=torch.float32).eval()
    preparer = backbone.preparer
    pixels = preparer.assemble([preparer.pack([preparer.one(images.load(i)) for i in range(6)])], torch.device("cpu"))
    with torch.inference_mode():
        expected = model(pixel_values=pixels, output_hidden_states=True)
        found = model.classifier(store.cls().float())
        assert torch.allclose(found, expected.logits, atol=tolerance)
        # And the tokens of block 6 are the normed hidden states of the patches.
        norm = model.vit.layernorm(expected.hidden_states[6])
    early = TokenStore(tmp_path, layer=6)
    assert torch.allclose(early[3].tokens.float(), norm[3, 1:], atol=tolerance)
    assert torch.allclose(early.cls()[3].float(), norm[3, 0], atol=tolerance)


@pytest.mark.assets
def test_without_the_norm_and_without_later_blocks(vit, images, tmp_path):
    options = BackboneOptions(layers=(0, 2), norm="none", device="cpu")
    backbone = open_backbone(vit, images, options)
    extract(images, backbone, tmp_path, dtype="float32", limit=2, progress=False, workers=0)
    model = transformers.ViTModel.from_pretrained(vit, dtype=torch.float32).eval()
    preparer = backbone.preparer
    pixels = preparer.assemble([preparer.pack([preparer.one(images.load(i)) for i in range(2)])], torch.device("cpu"))
    with torch.inference_mode():
        hidden = model(pixel_values=pixels, output_hidden_states=True).hidden_states
    for layer in (0, 2):
        assert torch.allclose(TokenStore(tmp_path, layer=layer)[1].tokens, hidden[layer][1, 1:], atol=1e-4)
    assert backbone.describe()["norm"] == "none"
    with pytest.raises(ValueError, match="from 0 to 12"):
        open_backbone(vit, images, BackboneOptions(layers=(13,)))


@pytest.mark.assets
def test_an_unreadable_image_is_named_or_skipped(vit, assets, tmp_path):
    for number, name in enumerate(("a/1.png", "a/2.png", "b/3.png")):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40 + number, 300), (number, 9, 9)).save(path)
    broken = tmp_path / "images" / "a" / "2.png"
    broken.write_bytes(broken.read_bytes()[:60])
    source = open_source(tmp_path / "images")
    backbone = open_backbone(vit, source, BackboneOptions(device="cpu"))
    with pytest.raises(TokenStoreError, match=rf"{broken}: is not an image.*--skip-bad"):
        extract(source, backbone, tmp_path / "store", progress=False, workers=1)
    store = extract(source, backbone, tmp_path / "store", resume=True, skip_bad=True, progress=False, workers=1)
    assert store.ids == ["a/1.png", "b/3.png"]
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert [entry["id"] for entry in manifest["shards"][0]["skipped"]] == ["a/2.png"]
    assert str(tmp_path) not in json.dumps(manifest)


@pytest.mark.parametrize(
    ("name", "norm", "prefix"),
    [
        ("DeiT", "final (layernorm)", 2),
        ("Dinov2WithRegisters", "final (layernorm)", 5),
        ("SiglipVision", "final (post_layernorm)", 0),
        ("CLIPVision", "none in the model", 1),
    ],
)
def test_other_vision_models(tmp_path, name, norm, prefix):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{name}Config")(**sizes, image_size=32, patch_size=8)
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path)
    backbone = VisionBackbone(str(tmp_path), layers=[1, 3])
    assert backbone.describe()["norm"] == norm
    assert backbone.has_cls == (prefix > 0)
    preparer = backbone.preparer
    units = [preparer.pack([preparer.one(Image.effect_mandelbrot((20, 20), (-2, -1, 1, 1), 9).convert("RGB"))])]
    encoded = backbone.encode(units, "float32")
    assert encoded.lengths == [16]
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        hidden = model(pixel_values=preparer.assemble(units, torch.device("cpu"))).last_hidden_state
    assert torch.allclose(encoded.tokens[3][0], hidden[0, prefix:], atol=1e-5)


class Sequences(SequenceSource):
    def __init__(self, texts):
        super().__init__(texts, [str(i) for i in range(len(texts))], np.zeros(len(texts), np.uint8), Labels())


PROTEINS = ["MKTAYIAKQR", "MUZOBX*KLV", "M", "MKKLLPTAAAGLLLLAAQPAMAHHHHHHGSDDK" * 3, "ACDEFGHIKLMNPQRSTVWY"]


@pytest.fixture(scope="module")
def esm(assets):
    return str(assets / "esm2_t6_8M_hemolysis")


@pytest.mark.assets
@pytest.mark.parametrize("side", ["left", "right"])
def test_esm_tokens_are_the_models_own_at_the_residues(esm, tmp_path, side):
    source = Sequences(PROTEINS)
    backbone = open_backbone(esm, source, BackboneOptions(device="cpu"))
    store = extract(source, backbone, tmp_path, dtype="float32", progress=False)
    assert store.lengths.tolist() == [len(text) for text in PROTEINS]
    model = transformers.EsmModel.from_pretrained(esm, dtype=torch.float32, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(esm, padding_side=side)
    batch = tokenizer(PROTEINS, return_tensors="pt", padding=True)
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    for row, item in enumerate(store):
        inner = hidden[row][batch["attention_mask"][row].bool()]
        assert torch.allclose(item.tokens, inner[1:-1], atol=1e-4)
        assert torch.allclose(item.cls, inner[0], atol=1e-4)
    counted = store.manifest.counts
    assert {name: counted[f"residue {name}"] for name in "UZOBX*"} == dict.fromkeys("UZOBX*", 1)


@pytest.mark.assets
def test_long_sequences_are_cut_or_windowed(esm, tmp_path):
    source = Sequences(["MKTAYIAKQRMKTAYIAKQRMKTAY", "MKT"])
    cut = extract(
        source,
        open_backbone(esm, source, BackboneOptions(device="cpu", max_length=10)),
        tmp_path / "cut",
        progress=False,
    )
    assert cut.lengths.tolist() == [10, 3]
    assert cut.manifest.counts == {"sequences cut": 1, "tokens cut off": 15}
    options = BackboneOptions(device="cpu", max_length=10, long="window")
    windowed = extract(source, open_backbone(esm, source, options), tmp_path / "windows", progress=False)
    assert windowed.lengths.tolist() == [25, 3]
    assert windowed.manifest.counts == {"sequences windowed": 1}
    alone = Sequences(["MKTAYIAK"])
    first = extract(alone, open_backbone(esm, alone, options), tmp_path / "alone", progress=False)
    assert torch.allclose(windowed[0].tokens[:8].float(), first[0].tokens.float(), atol=2e-3)
    with pytest.raises(ValueError, match="max_length: expected at most 1022"):
        open_backbone(esm, source, BackboneOptions(device="cpu", max_length=2000))


@pytest.mark.assets
def test_precision_is_that_asked_for(esm, tmp_path):
    source = Sequences(PROTEINS[:2])
    backbone = open_backbone(esm, source, BackboneOptions(device="cpu", precision="bfloat16"))
    assert {parameter.dtype for parameter in backbone._encoder.model.parameters()} == {torch.bfloat16}
    store = extract(source, backbone, tmp_path, dtype="bfloat16", progress=False)
    assert store[0].tokens.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A text encoder with random weights: post-norm, with CLS and SEP."""
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "set", "is", "pooled", "##s"]
    (folder / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
    )
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def test_a_text_encoder(bert, tmp_path):
    source = Sequences(["a set is pooled", "sets", "a nothing"])
    backbone = open_backbone(bert, source, BackboneOptions(device="cpu", layers=(1, -1)))
    assert backbone.describe()["norm"] == "none in the model"
    store = extract(source, backbone, tmp_path, dtype="float32", progress=False)
    assert store.lengths.tolist() == [4, 2, 2]
    assert store.manifest.counts == {"unknown tokens": 1}
    model = transformers.BertModel.from_pretrained(bert, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    with torch.inference_mode():
        hidden = model(**tokenizer("a set is pooled", return_tensors="pt"), output_hidden_states=True).hidden_states
    assert torch.allclose(store[0].tokens, hidden[3][0, 1:-1], atol=1e-5)
    assert torch.allclose(TokenStore(tmp_path, layer=1)[0].tokens, hidden[1][0, 1:-1], atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "mpnet", "luke", "data2vec-text"])
def test_a_text_is_as_long_as_the_models_positions_reach(bert, tmp_path, kind):
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.AutoConfig.for_model(
        kind, **shape, max_position_embeddings=12, vocab_size=10, pad_token_id=0 if kind == "bert" else 1
    )
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "model")
    source = Sequences(["a set " * 20])
    store = extract(source, open_backbone(str(tmp_path / "model"), source), tmp_path / "store", progress=False)
    # Less the two special tokens; all but BERT lose two more, those up to the number of the padding.
    assert store.lengths.tolist() == [10 if kind == "bert" else 8]


def test_a_checkpoint_that_lacks_weights_is_refused(bert, tmp_path):
    shutil.copytree(bert, tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    state = {name: value.clone() for name, value in state.items() if "layer.1.output.dense" not in name}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layer\.1\.output\.dense.*they would be random"):
        open_backbone(str(tmp_path), Sequences(["a"]), BackboneOptions(device="cpu"))
    with pytest.raises(ValueError, match="no folder"):
        open_backbone("./nowhere", Sequences(["a"]))
    with pytest.raises(ValueError, match="expected a model for a data set of kind 'sequence'"):
        open_backbone("identity", Sequences(["a"]))


def one_nearest_neighbour(features, labels):
    distances = torch.cdist(features, features).fill_diagonal_(torch.inf)
    return float((labels[distances.argmin(1)] == labels).float().mean())


@pytest.mark.assets
def test_pct_tells_shapes_apart(assets, tmp_path):
    shapes = open_source(assets / "modelnet40_ply_hdf5_2048")
    trained = PCT(assets / "pct_modelnet40_backbone.safetensors")
    torch.manual_seed(0)
    state = PointCloudTransformer().state_dict()
    once = {name: value for name, value in state.items() if "k_conv" not in name}  # shared weights are kept once
    save_file(once, tmp_path / "random.safetensors")
    labels = shapes.labels.values
    # At most ten shapes of a class: 60 % are airplanes, which even random weights tell from the rest.
    chosen = [i for i in range(len(shapes)) if int((labels[:i] == labels[i]).sum()) < 10]
    common = torch.bincount(labels[chosen])
    chosen = [i for i in chosen if common[labels[i]] >= 2]
    points = [shapes.load(i) for i in chosen]
    scores = []
    for backbone in (trained, PCT(tmp_path / "random.safetensors")):
        encoded = backbone.encode([backbone.preparer.pack(points)], "float32")
        pooled = torch.stack([tokens.mean(0) for tokens in encoded.tokens[5]])
        scores.append(one_nearest_neighbour(pooled, labels[chosen]))
    assert scores[0] >= 0.55, scores
    assert scores[0] >= scores[1] + 0.1, scores


@pytest.mark.assets
def test_pct_receives_what_its_batch_norms_remember(assets):
    # If the attention were of another form, the values that reach a batch norm would not have its running mean.
    shapes = open_source(assets / "modelnet40_ply_hdf5_2048")
    backbone = PCT(assets / "pct_modelnet40_backbone.safetensors")
    labels = shapes.labels.values
    chosen = [i for i in range(len(shapes)) if int((labels[:i] == labels[i]).sum()) < 5]
    points = torch.stack([torch.from_numpy(shapes.load(i).points) for i in chosen])
    heard = {}

    def hear(module, args):
        heard[module] = args[0]

    norms = {m: name for name, m in backbone._model.named_modules() if isinstance(m, torch.nn.BatchNorm1d)}
    for norm in norms:
        norm.register_forward_pre_hook(hear)
    with torch.inference_mode():
        backbone._model(points)
    assert len(heard) == 7
    for norm, values in heard.items():
        shift = ((values.mean((0, 2)) - norm.running_mean) / norm.running_var.sqrt()).abs().mean()
        assert shift < 0.15, (norms[norm], float(shift))


def test_pct_layers_sizes_and_wrong_weights(tmp_path):
    save_file(PointCloudTransformer().state_dict(), tmp_path / "pct.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    torch.save(PointCloudTransformer().state_dict(), tmp_path / "pct.pt")
    backbone = PCT(tmp_path / "pct.safetensors", layers=[1, 5])
    assert dict(backbone.layers) == {1: 128, 5: 256}
    sets = [torch.randn(count, 3) for count in (7, 3, 7)]
    unit = backbone.preparer.pack([Points(points.numpy()) for points in sets])
    encoded = backbone.encode([unit], "float32")
    for position, points in enumerate(sets):
        with torch.inference_mode():
            alone = backbone._model(points[None])[5][0]
        assert torch.allclose(encoded.tokens[5][position], alone, atol=1e-5)
    PCT(tmp_path / "pct.pt")
    with pytest.raises(ValueError, match="weights of a naive PCT"):
        PCT(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="there is none"):
        PCT(tmp_path / "nowhere.safetensors")
