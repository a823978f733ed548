"""What `preprocessor_config.json` asks for, done with Pillow and torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cswe.tokens.backbones.resize import SUPPORTS, enlarge_images
from cswe.tokens.errors import BadItemError

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImageRecipe:
    """How an image becomes the model's input.

    Parameters
    ----------
    resize
        ``(height, width)``; ``(edge,)`` for the shorter edge, the other in proportion; None not to resize.
    crop
        ``(height, width)`` of a centre crop, or None.
    resample
        Pillow's number of the filter.
    scale, mean, std
        A value v becomes ``(v · scale − mean) / std``.
    """

    resize: tuple[int, ...] | None
    crop: tuple[int, int] | None
    resample: int = 3
    scale: float = 1 / 255
    mean: tuple[float, ...] = _IMAGENET_MEAN
    std: tuple[float, ...] = _IMAGENET_STD

    @classmethod
    def from_config(cls, config: Mapping[str, Any], image_size: tuple[int, int]) -> "ImageRecipe":
        """Read a ``preprocessor_config.json``; `image_size` stands in for what it does not say.

        Examples
        --------
        >>> config = {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": 224}
        >>> ImageRecipe.from_config(config, (224, 224))
        ImageRecipe(resize=(256,), crop=(224, 224), resample=3, ...)
        """
        resize = _size(config.get("size", {"height": image_size[0], "width": image_size[1]}))
        crop = _size(config.get("crop_size", {"height": image_size[0], "width": image_size[1]}))
        normalize = config.get("do_normalize", True)
        recipe = cls(
            resize=resize if config.get("do_resize", True) else None,
            crop=(crop[0], crop[-1]) if config.get("do_center_crop", False) else None,
            resample=int(config.get("resample", 3)),
            scale=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
            mean=tuple(config.get("image_mean", _IMAGENET_MEAN)) if normalize else (0.0,) * 3,
            std=tuple(config.get("image_std", _IMAGENET_STD)) if normalize else (1.0,) * 3,
        )
        if recipe.resize is not None and len(recipe.resize) == 1 and recipe.crop is None:
            raise ValueError("preprocessor_config.json: expected a centre crop after shortest_edge but there is none")
        if recipe.resize and recipe.crop and min(recipe.resize) < max(recipe.crop):
            raise ValueError(f"preprocessor_config.json: expected size ≥ crop_size but got {resize} and {crop}")
        return recipe

    @property
    def output(self) -> tuple[int, int]:
        """Height and width of what comes out."""
        size = self.crop or self.resize
        if size is None:
            raise ValueError("preprocessor_config.json: expected do_resize or do_center_crop but neither is set")
        return size[0], size[-1]

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Size of an image after resizing, before the crop."""
        if self.resize is None:
            return height, width
        if len(self.resize) == 2:
            return self.resize[0], self.resize[1]
        edge = self.resize[0]
        if height <= width:
            return edge, int(edge * width / height)
        return int(edge * height / width), edge

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's form."""
        return asdict(self)


def _size(value: Any) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value, value)
    if "height" in value:
        return (int(value["height"]), int(value["width"]))
    if "shortest_edge" in value:
        return (int(value["shortest_edge"]),)
    raise ValueError(f"preprocessor_config.json: expected height and width, or shortest_edge, but got {value}")


@dataclass
class ImageUnit:
    """Some images, those of one size in one uint8 tensor ``(n, 3, H, W)``, each with its positions in the unit."""

    count: int
    parts: list[tuple[list[int], Tensor]]


class ImagePreparer:
    """Shrinks large images in the worker; leaves small ones, to be enlarged where the model is.

    Which of the two happens depends on the image alone, and both compute the same thing.
    """

    def __init__(self, recipe: ImageRecipe) -> None:
        self.recipe = recipe

    def one(self, raw: Any) -> Tensor:
        """Turn a Pillow image into uint8 ``(3, H, W)``."""
        height, width = self.recipe.resized(raw.height, raw.width)
        top, left, bottom, right = _crop_box(self.recipe, height, width)
        output = self.recipe.output
        # What has the model's size when it arrives is taken for finished, so anything of that size is finished here.
        # And what shrinks along an axis is, since the order in which Pillow takes the axes then varies.
        small = raw.height <= height and raw.width <= width and raw.height * raw.width <= output[0] * output[1]
        if not small or (raw.height, raw.width) == output or self.recipe.resample not in SUPPORTS:
            raw = raw.resize((width, height), self.recipe.resample).crop((left, top, right, bottom))
        return torch.from_numpy(np.array(raw, dtype=np.uint8)).permute(2, 0, 1)

    def pack(self, prepared: list[Tensor]) -> ImageUnit:
        """Stack images of equal size."""
        places: dict[tuple[int, ...], list[int]] = {}
        for position, image in enumerate(prepared):
            places.setdefault(tuple(image.shape), []).append(position)
        parts = [(where, torch.stack([prepared[position] for position in where])) for where in places.values()]
        return ImageUnit(len(prepared), parts)

    def assemble(self, units: Sequence[ImageUnit], device: torch.device) -> Tensor:
        """Turn packed units into the model's input, float32 ``(B, 3, H, W)`` on `device`."""
        height, width = self.recipe.output
        pixels = torch.empty(sum(unit.count for unit in units), 3, height, width, device=device)
        start = 0
        for unit in units:
            for where, images in unit.parts:
                there = torch.tensor(where, device=device) + start
                pixels.index_copy_(0, there, self._finish(images.to(device, non_blocking=True)))
            start += unit.count
        mean = torch.tensor(self.recipe.mean, device=device)[:, None, None]
        std = torch.tensor(self.recipe.std, device=device)[:, None, None]
        return pixels.mul_(self.recipe.scale).sub_(mean).div_(std)

    def _finish(self, images: Tensor) -> Tensor:
        if tuple(images.shape[-2:]) == self.recipe.output:  # finished by the worker
            return images.float()
        height, width = self.recipe.resized(images.shape[-2], images.shape[-1])
        top, left, bottom, right = _crop_box(self.recipe, height, width)
        return enlarge_images(images, height, width, self.recipe.resample)[:, :, top:bottom, left:right]


def _crop_box(recipe: ImageRecipe, height: int, width: int) -> tuple[int, int, int, int]:
    if recipe.crop is None:
        return 0, 0, height, width
    if height < recipe.crop[0] or width < recipe.crop[1]:
        raise BadItemError(f"expected an image of at least {recipe.crop} pixels but got ({height}, {width})")
    top, left = (height - recipe.crop[0]) // 2, (width - recipe.crop[1]) // 2
    return top, left, top + recipe.crop[0], left + recipe.crop[1]
