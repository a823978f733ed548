"""From a name to a backbone."""

from dataclasses import dataclass, fields
from pathlib import Path

from cswe._devices import usable_device
from cswe.tokens.backbones.base import Backbone, Norm, Precision
from cswe.tokens.backbones.hf_sequence import Long, SequenceBackbone
from cswe.tokens.backbones.hf_vision import VisionBackbone
from cswe.tokens.backbones.identity import Identity
from cswe.tokens.backbones.pct import PCT
from cswe.tokens.sources.base import Source
from cswe.tokens.sources.opening import refuse_unused

_ALL_USE = {"layers", "device"}
_WEIGHTS = (".safetensors", ".pt", ".pth", ".t7")


@dataclass(frozen=True)
class BackboneOptions:
    """Choices about the model.

    Parameters
    ----------
    layers
        Blocks after which tokens are kept: 0 is the input of the first, -1 the last. The last if none is given.
    norm
        Whether the model's final norm is applied after every one of them: final or none.
    precision
        The type that the model is loaded in and runs in.
    device
        Where it runs: cpu, cuda. A GPU if there is one.
    revision
        Which commit of the model on the hub.
    batch_tokens
        Tokens in a batch. The same number gives the same bytes.
    long
        What becomes of sequences that are too long for the model: cut, or window.
    max_length
        The length from which on they are, if not the model's own limit.
    """

    layers: tuple[int, ...] = ()
    norm: Norm = "final"
    precision: Precision = "float32"
    device: str | None = None
    revision: str | None = None
    batch_tokens: int = 2**15
    long: Long = "cut"
    max_length: int | None = None


def open_backbone(name: str, source: Source, options: BackboneOptions | None = None) -> Backbone:
    """Open the backbone that `name` means for the items of `source`.

    Parameters
    ----------
    name
        ``"identity"``; a file with the weights of a Point Cloud Transformer; a folder with a model of the
        transformers library, or the name of one on the hub.
    source
        The data set: images are given to vision models, sequences to protein models and text encoders.
    options
        Choices about the model.

    Examples
    --------
    >>> from cswe.tokens.sources import open_source
    >>> open_backbone("identity", open_source()).layers
    {0: 2}
    """
    chosen = options or BackboneOptions()
    device = usable_device(chosen.device)
    if chosen.batch_tokens < 1:
        raise ValueError(f"batch_tokens: expected at least 1 but got {chosen.batch_tokens}")
    layers = chosen.layers or None
    if name == "identity" or Path(name).suffix in _WEIGHTS:
        if source.kind != "points":
            raise ValueError(f"backbone: expected a model for a data set of kind {source.kind!r} but got {name!r}")
        if name == "identity":
            refuse_unused(chosen, _ALL_USE, "the backbone identity")
            if layers not in (None, (0,)):
                raise ValueError(f"layers: expected none, since the backbone is identity, but got {list(layers)}")
            return Identity(source.dim, weighted=source.has_weights)
        refuse_unused(chosen, _ALL_USE | {"precision", "batch_tokens"}, "a Point Cloud Transformer")
        return PCT(
            name,
            layers=layers,
            device=device,
            precision=chosen.precision,
            batch_tokens=chosen.batch_tokens,
            weighted=source.has_weights,
        )
    if source.kind == "image":
        refuse_unused(chosen, {field.name for field in fields(chosen)} - {"long", "max_length"}, "a vision model")
        return VisionBackbone(
            name,
            layers=layers,
            norm=chosen.norm,
            precision=chosen.precision,
            device=device,
            revision=chosen.revision,
            batch_tokens=chosen.batch_tokens,
        )
    if source.kind == "sequence":
        return SequenceBackbone(
            name,
            layers=layers,
            norm=chosen.norm,
            precision=chosen.precision,
            device=device,
            revision=chosen.revision,
            batch_tokens=chosen.batch_tokens,
            long=chosen.long,
            max_length=chosen.max_length,
        )
    raise ValueError(
        f"backbone: expected 'identity' or the weights of a Point Cloud Transformer for point sets but got {name!r}"
    )
