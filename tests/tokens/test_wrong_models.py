"""Models that do not fit the data, or are damaged, and devices that are not there: an error in words."""

import pytest
import torch
from safetensors.torch import save_file

from cswe.tokens.backbones import BackboneOptions, open_backbone
from cswe.tokens.backbones.hf_sequence import SequenceBackbone
from cswe.tokens.backbones.hf_vision import VisionBackbone
from cswe.tokens.backbones.pct import PCT

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def vit(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'data'")
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("size", [0, 100, -100])
def test_weights_that_are_cut_short(vit, size):
    file = vit / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"expected weights at .* could not be loaded"):
        VisionBackbone(str(vit))


def test_a_damaged_recipe_is_named(vit):
    (vit / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"preprocessor_config\.json: expected JSON"):
        VisionBackbone(str(vit))


def test_a_model_for_other_data(vit, tmp_path):
    with pytest.raises(ValueError, match=r"expected a model for sequences but got .* of type vit.* tokenizer") as error:
        SequenceBackbone(str(vit))
    assert "\n" not in str(error.value)
    transformers = pytest.importorskip("transformers", reason="needs the extra 'data'")
    text = tmp_path / "bert"
    transformers.BertModel(transformers.BertConfig(vocab_size=10, **SIZES)).save_pretrained(text)
    with pytest.raises(ValueError, match=r"expected a vision model for images but got .* of type bert"):
        VisionBackbone(str(text))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.safetensors", b"garbage" * 10),
        ("b.pt", b"garbage" * 10),
        ("c.pt", b""),
        ("d.pt", [1, 2]),
        ("e.pt", {"state_dict": {"x": 1}}),
    ],
)
def test_files_that_are_no_weights(tmp_path, name, content):
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ValueError, match=rf"{name}: expected .*weights of a naive PCT") as error:
        PCT(file)
    assert "weights_only" not in str(error.value)  # no advice to run what is in the file


def test_a_device_that_is_not_there(some_points):
    for device in ("cuda:99", "abacus"):
        with pytest.raises(ValueError, match=f"device: expected one that torch can use here.*'{device}'"):
            open_backbone("identity", some_points(3), BackboneOptions(device=device))


def test_choices_that_do_not_matter_are_refused(vit, some_points, tmp_path):
    source = some_points(3, dim=3)
    with pytest.raises(ValueError, match=r"norm: .* the backbone identity has no use for it, but got none"):
        open_backbone("identity", source, BackboneOptions(norm="none"))
    save_file({"x": torch.ones(1)}, tmp_path / "pct.safetensors")
    with pytest.raises(ValueError, match=r"max_length: .* Point Cloud Transformer has no use for it, but got 5"):
        open_backbone(str(tmp_path / "pct.safetensors"), source, BackboneOptions(max_length=5))
    source.kind = "image"
    with pytest.raises(ValueError, match=r"long: .* vision model has no use for it"):
        open_backbone(str(vit), source, BackboneOptions(long="window"))
