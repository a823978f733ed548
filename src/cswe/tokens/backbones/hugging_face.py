"""Any encoder of the transformers library: found, loaded, and listened to between its blocks."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from cswe._extras import require
from cswe.tokens.backbones.base import Norm, Precision, check_choice, resolve_layers, stored_type

# Where encoders keep the norm that follows their last block. Which of these it is, if any, is tried out.
_NORMS = (
    "layernorm",
    "layer_norm",
    "norm",
    "ln_f",
    "final_norm",
    "final_layer_norm",
    "post_layernorm",
    "encoder.emb_layer_norm_after",
    "encoder.final_layer_norm",
    "encoder.layer_norm",
    "encoder.layernorm",
    "encoder.norm",
)
# Parts that tokens do not pass through; a checkpoint may lack them.
_UNUSED = ("pooler", "head", "classifier", "mask_token", "position_ids", "decoder", "logit_scale", "text_model")


def read_config(name: str, revision: str | None = None) -> Any:
    """Read a model's configuration from a folder, or by its name on the hub."""
    transformers = require("transformers", "data")
    folder = Path(name)
    if not folder.is_dir() and (folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ValueError(f"backbone: expected a folder or a name on the hub but there is no folder {name}")
    try:
        return transformers.AutoConfig.from_pretrained(name, revision=revision, local_files_only=folder.is_dir())
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"backbone: expected a model of the transformers library at {name!r} but it could not be read: {reason}"
        ) from None


def read_json(name: str, file: str, revision: str | None) -> dict[str, Any] | None:
    """Read a JSON file that belongs to a model, from its folder or from the hub; None if there is none."""
    if Path(name).is_dir():
        path = Path(name) / file
    else:
        hub = require("huggingface_hub", "data")
        try:
            path = Path(hub.hf_hub_download(name, file, revision=revision))
        except (OSError, ValueError):
            return None
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON but {error}; download it again") from None
    return content if isinstance(content, dict) else None


class Encoder:
    """A transformer encoder and its hidden states after chosen blocks, with the final norm applied to each.

    Parameters
    ----------
    name
        A folder, or a name on the hub.
    layers
        Block numbers; None for the last.
    norm
        ``"final"``: the norm that the model applies after its last block is applied after every block chosen.
        ``"none"``: hidden states as they are.
    precision
        The type that the model is loaded in and runs in.
    device, revision
        Where it runs; which commit of the hub.
    """

    def __init__(
        self,
        name: str,
        *,
        layers: Sequence[int] | None,
        norm: Norm,
        precision: Precision,
        device: str | torch.device,
        revision: str | None,
    ) -> None:
        check_choice("norm", norm, Norm)
        check_choice("precision", precision, Precision)
        self.device = torch.device(device)
        self.dtype = stored_type(precision)
        self._config = read_config(name, revision)
        model = _load(name, self._config, self.dtype, revision)
        # Two-tower models: what is wanted of them is the tower that sees.
        self.model: nn.Module = getattr(model, "vision_model", model).requires_grad_(False).eval().to(self.device)
        self.config = getattr(self._config, "vision_config", self._config)
        self._parent, self._attribute, self._blocks = _find_blocks(self.model, self.config)
        self.depth = len(self._blocks)
        self.layers = resolve_layers(layers, self.depth)
        self.dim = int(self.config.hidden_size)
        self._heard: dict[int, Tensor] = {}
        self._listen()
        self._norm_choice: Norm = norm
        self._norm: nn.Module | None = None
        self._norm_name = "none"
        self._notes = {
            "name": Path(name).resolve().name if Path(name).is_dir() else name,
            "architecture": type(self.model).__name__,
            "revision": _revision(name, self._config),
            "precision": precision,
        }

    def settle(self, **probe: Tensor) -> None:
        """Find the final norm by trying a small input, then leave out the blocks that no layer needs."""
        handle = self._blocks[-1].register_forward_hook(lambda module, args, output: last.append(_tensor(output)))
        last: list[Tensor] = []
        output = self._run(probe)
        handle.remove()
        if not isinstance(getattr(output, "last_hidden_state", None), Tensor):
            raise ValueError(f"backbone: expected an encoder but {type(self.model).__name__} gives no hidden states")
        if self._norm_choice == "final":
            self._norm, self._norm_name = self._find_norm(last[0], output.last_hidden_state)
        setattr(self._parent, self._attribute, self._blocks[: max(max(self.layers), 1)])

    def _find_norm(self, before: Tensor, after: Tensor) -> tuple[nn.Module | None, str]:
        if torch.equal(before, after):
            return None, "none in the model"
        for name in _NORMS:
            try:
                module = self.model.get_submodule(name)
            except AttributeError:
                continue
            if torch.allclose(module(before).float(), after.float(), atol=1e-3, rtol=1e-3):
                return module, f"final ({name})"
        raise ValueError(
            f"norm: expected to find the final norm of {type(self.model).__name__} but it is none of "
            f"{', '.join(_NORMS)}; use --norm none"
        )

    def _listen(self) -> None:
        for layer in self.layers:
            if layer == 0:
                self._blocks[0].register_forward_pre_hook(self._hear_input, with_kwargs=True)
            else:
                self._blocks[layer - 1].register_forward_hook(self._hear_output(layer))

    def _hear_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._heard[0] = args[0] if args else kwargs["hidden_states"]

    def _hear_output(self, layer: int) -> Any:
        def hear(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._heard[layer] = _tensor(output)

        return hear

    @torch.inference_mode()
    def _run(self, inputs: dict[str, Tensor]) -> Any:
        return self.model(**inputs)

    @torch.inference_mode()
    def hidden(self, **inputs: Tensor) -> dict[int, Tensor]:
        """Run the model; return the hidden states of every layer, ``(B, N, d)``, with the norm applied."""
        self._heard = {}
        self.model(**inputs)
        heard, self._heard = self._heard, {}
        return {layer: values if self._norm is None else self._norm(values) for layer, values in heard.items()}

    def describe(self) -> dict[str, Any]:
        """Return the manifest's notes."""
        return {**self._notes, "norm": self._norm_name}


def _load(name: str, config: Any, dtype: torch.dtype, revision: str | None) -> nn.Module:
    transformers = require("transformers", "data")
    kind = (
        transformers.AutoModelForTextEncoding
        if getattr(config, "is_encoder_decoder", False)
        else transformers.AutoModel
    )
    options: dict[str, Any] = {
        "dtype": dtype,
        "revision": revision,
        "local_files_only": Path(name).is_dir(),
        "output_loading_info": True,
        "weights_only": True,
    }
    with _quiet(transformers):
        try:
            try:
                # Without a pooler where the model lets us choose: checkpoints do not train it, and we never use it.
                model, report = kind.from_pretrained(name, add_pooling_layer=False, **options)
            except TypeError:
                model, report = kind.from_pretrained(name, **options)
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"backbone: expected weights at {name!r} but they could not be loaded: {reason}") from None
    missing = sorted(key for key in report["missing_keys"] if not any(part in key for part in _UNUSED))
    if missing or report["mismatched_keys"]:
        faulty = missing or sorted(str(key) for key in report["mismatched_keys"])
        raise ValueError(
            f"backbone: expected all weights of {type(model).__name__} at {name!r} but {len(faulty)} are missing or "
            f"of another shape, {faulty[0]} for one; they would be random"
        )
    loaded: nn.Module = model
    return loaded


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence the library's own report: what matters of it is checked here, and a pooler missing is no matter."""
    logging = transformers.utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _find_blocks(model: nn.Module, config: Any) -> tuple[nn.Module, str, nn.ModuleList]:
    depth = getattr(config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            parent, _, attribute = name.rpartition(".")
            return model.get_submodule(parent), attribute, module
    raise ValueError(
        f"backbone: expected a transformer with a list of {depth} blocks but {type(model).__name__} has none; "
        "hierarchical and convolutional models are not supported"
    )


def _tensor(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _revision(name: str, config: Any) -> str:
    folder = Path(name)
    if not folder.is_dir():
        return str(getattr(config, "_commit_hash", None) or "unknown")
    checksum = hashlib.sha256()
    files = sorted(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    for file in files:
        with file.open("rb") as stream:
            checksum.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256:{checksum.hexdigest()[:32]}"
