"""Vision transformers: patch tokens, and the CLS vector apart."""

from collections.abc import Sequence
from typing import Any

import torch

from cswe.tokens.backbones.base import Backbone, Encoded, Norm, Precision, stored_type
from cswe.tokens.backbones.hugging_face import Encoder, read_json
from cswe.tokens.backbones.image_preparer import ImagePreparer, ImageRecipe


class VisionBackbone(Backbone):
    """A ViT, DeiT, DINOv2, SigLIP, CLIP … of the transformers library.

    Tokens are the patches'. CLS is the hidden state at the first position, normed like the tokens; never the
    ``pooler``, which most checkpoints do not have and the library then fills with random weights.

    Parameters
    ----------
    name
        A folder, or a name on the hub.
    layers, norm, precision, device, revision
        As in `Encoder`.
    batch_tokens
        Tokens in a batch, and so images.
    """

    kind = "image"
    unit = 64

    def __init__(
        self,
        name: str,
        *,
        layers: Sequence[int] | None = None,
        norm: Norm = "final",
        precision: Precision = "float32",
        device: str | torch.device = "cpu",
        revision: str | None = None,
        batch_tokens: int = 2**15,
    ) -> None:
        self._encoder = Encoder(name, layers=layers, norm=norm, precision=precision, device=device, revision=revision)
        self.device = self._encoder.device
        config = self._encoder.config
        if not hasattr(config, "image_size") or not hasattr(config, "patch_size"):
            raise ValueError(
                f"backbone: expected a vision model for images but got {name!r}, of type {config.model_type}"
            )
        found = read_json(name, "preprocessor_config.json", revision)
        recipe = ImageRecipe.from_config(found or {}, _pair(config.image_size))
        self._config_found = found is not None
        self.preparer: ImagePreparer = ImagePreparer(recipe)
        height, width = recipe.output
        self.unit_bytes = self.unit * 3 * height * width
        patch = _pair(config.patch_size)
        self._patches = (height // patch[0]) * (width // patch[1])
        # Some image, not an even one: with nothing to see a norm may change nothing, and so not be found.
        waves = torch.arange(3.0 * height * width).sin().view(1, 3, height, width)
        probe = waves.to(self.device, self._encoder.dtype)
        self._encoder.settle(pixel_values=probe)
        prefix = next(iter(self._encoder.hidden(pixel_values=probe).values())).shape[1] - self._patches
        if prefix < 0:
            raise ValueError(f"backbone: expected a token for each of {self._patches} patches but some are missing")
        # CLS comes first; distillation tokens and registers, if any, come between it and the patches.
        self._prefix = prefix
        self.has_cls = prefix > 0
        self.layers = dict.fromkeys(self._encoder.layers, self._encoder.dim)
        self.group = max(1, batch_tokens // (self._patches + prefix))

    def encode(self, units: Sequence[Any], dtype: str) -> Encoded:
        """Encode the images of some units as one batch."""
        pixels = self.preparer.assemble(units, self.device).to(self._encoder.dtype)
        hidden = self._encoder.hidden(pixel_values=pixels)
        finite = torch.ones(len(pixels), dtype=torch.bool, device=self.device)
        encoded = Encoded({}, [self._patches] * len(pixels), finite)
        for layer in self._encoder.layers:
            stored = hidden[layer].to(stored_type(dtype))
            finite &= torch.isfinite(stored).flatten(1).all(1)
            encoded.tokens[layer] = [stored[:, self._prefix :].flatten(0, 1).cpu()]
            if self.has_cls:
                encoded.cls[layer] = stored[:, 0].cpu()
        encoded.finite = finite.cpu()
        return encoded

    def describe(self) -> dict[str, Any]:
        """Return the manifest's notes."""
        return {**self._encoder.describe(), "images_per_batch": self.group}

    def preprocessing(self) -> dict[str, Any]:
        """Return how images were prepared."""
        origin = "preprocessor_config.json" if self._config_found else "defaults: no preprocessor_config.json"
        return {**self.preparer.recipe.to_json(), "from": origin}


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
