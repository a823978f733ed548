"""Images in folders and zips."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cswe._extras import require
from cswe.tokens.errors import BadItemError
from cswe.tokens.labels import Labels
from cswe.tokens.sources.archives import FilePool
from cswe.tokens.sources.base import Source

EXTENSIONS = {".jpeg", ".jpg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


class ImageSource(Source):
    """Images, each known by the folder or zip that it is in and by its name there.

    Parameters
    ----------
    containers
        The folders and zips.
    places
        For every item the number of its container and its name there.
    ids, splits, labels
        As in `Source`.
    """

    kind = "image"
    name = "images"

    def __init__(
        self,
        containers: Sequence[Path],
        places: Sequence[tuple[int, str]],
        ids: Sequence[str],
        splits: npt.NDArray[np.uint8],
        labels: Labels,
    ) -> None:
        super().__init__(ids, splits, labels, origin=", ".join(map(str, containers)))
        self._containers = list(containers)
        self._places = places
        self._files = FilePool()

    def load(self, index: int) -> Any:
        """Read and decode one image, as RGB."""
        container, member = self._places[index]
        return decode_image(self._files.read(self._containers[container], member))

    def stamp(self, index: int) -> bytes:
        """Return size and, from a zip, checksum of an image's file."""
        container, member = self._places[index]
        return self._files.stamp(self._containers[container], member)

    def locate(self, index: int) -> str:
        """Say where an image lies."""
        container, member = self._places[index]
        return f"{self._containers[container] / member}"


def decode_image(data: bytes) -> Any:
    """Decode an image to RGB, or say in words that do not change from run to run why that is not possible."""
    image_module = require("PIL.Image", "data")
    try:
        with warnings.catch_warnings():
            # Pillow only warns of an image that would fill the memory, up to twice its limit.
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            with image_module.open(io.BytesIO(data)) as image:
                return _to_8_bits(image_module, image).convert("RGB")
    except (BadItemError, MemoryError):
        raise
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning):
        raise BadItemError("is too large an image to be decoded safely") from None
    except Exception as error:  # of many kinds: Pillow's readers do not expect what a broken file may hold
        raise BadItemError(f"is not an image that can be read ({type(error).__name__})") from None


def _to_8_bits(image_module: Any, image: Any) -> Any:
    """Scale 16-bit grey to 8 bits, which Pillow would clip: almost all of such an image would be white."""
    # Pillow gives the 16 bits of these two formats as 32, or as 16, depending on its version.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.int64)
        return image_module.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "whole" if image.mode == "I" else "real"
        raise BadItemError(f"has 32-bit {kind} numbers as pixels, of unknown range; save it with 8 or 16 bits")
    return image
