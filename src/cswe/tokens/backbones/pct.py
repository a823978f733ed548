"""The Point Cloud Transformer.

References
----------
.. [1] Guo, Cai, Liu, Mu, Martin, Hu. PCT: Point cloud transformer. Computational Visual Media, 2021.
"""

import hashlib
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from cswe.tokens.backbones.base import (
    Backbone,
    Encoded,
    Precision,
    check_choice,
    resolve_layers,
    stored_type,
)
from cswe.tokens.backbones.point_batches import PointPreparer, join_units


class PointEmbedding(nn.Module):
    """Two pointwise linear maps, 3 → width → width, each with batch norm and ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, width, 1, bias=False)
        self.conv2 = nn.Conv1d(width, width, 1, bias=False)
        self.bn1 = nn.BatchNorm1d(width)
        self.bn2 = nn.BatchNorm1d(width)

    def forward(self, points: Tensor) -> Tensor:
        """``(B, 3, N)`` to ``(B, width, N)``."""
        hidden = torch.relu(self.bn1(self.conv1(points)))
        return torch.relu(self.bn2(self.conv2(hidden)))


class PointAttention(nn.Module):
    """Self-attention between points, added to the input; in trained weights queries and keys are the same.

    With ``A = softmax(QᵀK / √d_k)`` over its last axis: ``x + ReLU(BatchNorm(W (V A)))``.

    The form is that of the published weights: with it, and not with the offset ``x − V A`` or the second
    normalisation that the paper also describes, the batch norms receive what they remember from training.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_conv = nn.Conv1d(width, width // 4, 1, bias=False)
        self.k_conv = nn.Conv1d(width, width // 4, 1, bias=False)
        self.v_conv = nn.Conv1d(width, width, 1)
        self.trans_conv = nn.Conv1d(width, width, 1)
        self.after_norm = nn.BatchNorm1d(width)

    def forward(self, hidden: Tensor) -> Tensor:
        """``(B, width, N)`` to the same."""
        queries, keys, values = self.q_conv(hidden), self.k_conv(hidden), self.v_conv(hidden)
        attention = torch.softmax(queries.transpose(1, 2) @ keys / math.sqrt(queries.shape[1]), dim=-1)
        return hidden + torch.relu(self.after_norm(self.trans_conv(values @ attention)))


class PointCloudTransformer(nn.Module):
    """The naive PCT of the paper, without its head: points in, tokens out.

    Parameters
    ----------
    width, out_dim
        Dimension inside and of the tokens.

    Examples
    --------
    >>> model = PointCloudTransformer().eval()
    >>> [tuple(hidden.shape) for hidden in model(torch.randn(2, 10, 3))][-1]
    (2, 10, 256)
    """

    def __init__(self, width: int = 128, out_dim: int = 256) -> None:
        super().__init__()
        self.embedding = PointEmbedding(width)
        self.sa1 = PointAttention(width)
        self.sa2 = PointAttention(width)
        self.sa3 = PointAttention(width)
        self.sa4 = PointAttention(width)
        self.linear = nn.Sequential(
            nn.Conv1d(4 * width, out_dim, 1, bias=False), nn.BatchNorm1d(out_dim), nn.LeakyReLU(0.2)
        )

    def forward(self, points: Tensor) -> list[Tensor]:
        """``(B, N, 3)`` to the embedding, the output of each block, and the tokens: six of ``(B, N, d)``."""
        hidden = [self.embedding(points.transpose(1, 2))]
        for block in (self.sa1, self.sa2, self.sa3, self.sa4):
            hidden.append(block(hidden[-1]))
        hidden.append(self.linear(torch.cat(hidden[1:], dim=1)))
        return [values.transpose(1, 2) for values in hidden]


class PCT(Backbone):
    """A trained Point Cloud Transformer.

    Layer 0 is the embedding, layers 1 to 4 are the blocks (128 dimensions), layer 5 the tokens proper (256).

    Parameters
    ----------
    weights
        A safetensors file, or a pickled ``state_dict``, which is read with ``weights_only=True``; keys may stand under
        ``backbone.`` or ``encoder.``.
    layers
        Which layers to give; the last by default.
    device, precision
        Where and in which type the model runs.
    batch_tokens
        Points in a batch.
    weighted
        Whether points have weights, which are then kept for their tokens.
    """

    kind = "points"

    def __init__(
        self,
        weights: str | Path,
        *,
        layers: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
        precision: Precision = "float32",
        batch_tokens: int = 2**15,
        weighted: bool = False,
    ) -> None:
        check_choice("precision", precision, Precision)
        file = Path(weights)
        state = _read_weights(file)
        self.device = torch.device(device)
        self._model = PointCloudTransformer()
        try:
            self._model.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(f"{file}: expected the weights of a naive PCT but {error}") from None
        self._model.requires_grad_(False).eval().to(self.device, stored_type(precision))
        dims = [128] * 5 + [256]
        self.layers = {layer: dims[layer] for layer in resolve_layers(layers, 5)}
        self.preparer = PointPreparer(3, weighted=weighted)
        self._precision, self._batch_tokens = precision, batch_tokens
        with file.open("rb") as stream:
            revision = hashlib.file_digest(stream, "sha256").hexdigest()
        self._notes = {"name": file.stem, "architecture": "PCT", "revision": f"sha256:{revision[:32]}"}

    @torch.inference_mode()
    def encode(self, units: Sequence[Any], dtype: str) -> Encoded:
        """Encode sets of points; a batch holds sets of one size, since the model knows no padding."""
        unit = join_units(units)
        sets = unit.points.split(unit.lengths)
        pieces: dict[int, list[Tensor]] = {layer: [torch.empty(0)] * len(sets) for layer in self.layers}
        finite = torch.ones(len(sets), dtype=torch.bool)
        for batch in self._batches(unit.lengths):
            points = torch.stack([sets[position] for position in batch]).to(self.device)
            hidden = self._model(points.to(stored_type(self._precision)))
            for layer in self.layers:
                stored = hidden[layer].to(stored_type(dtype)).contiguous()
                finite[batch] &= torch.isfinite(stored).flatten(1).all(1).cpu()
                for position, tokens in zip(batch, stored.cpu(), strict=True):
                    pieces[layer][position] = tokens
        weights = [] if unit.weights is None else [unit.weights]
        return Encoded(pieces, unit.lengths, finite, weights=weights)

    def _batches(self, lengths: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        for position in sorted(range(len(lengths)), key=lambda index: lengths[index]):
            last = batches[-1] if batches else []
            fits = last and lengths[last[0]] == lengths[position]
            if fits and (len(last) + 1) * lengths[position] <= self._batch_tokens:
                last.append(position)
            else:
                batches.append([position])
        return batches

    def describe(self) -> dict[str, Any]:
        """Return the manifest's notes."""
        return {**self._notes, "precision": self._precision, "batch_tokens": self._batch_tokens, "group": self.group}


def _read_weights(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise ValueError(f"{file}: expected a file with the weights of a PCT but there is none")
    try:
        safe = file.suffix == ".safetensors"
        content: Any = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's words for it advise to run whatever is in the file
        raise ValueError(f"{file}: expected the weights of a naive PCT but it is no pickled state_dict") from None
    except (SafetensorError, RuntimeError, EOFError, ValueError) as error:
        reason = (str(error).splitlines() or ["it ends too early"])[0]
        raise ValueError(f"{file}: expected the weights of a naive PCT but it cannot be read: {reason}") from None
    state: dict[str, Any] = content.get("state_dict", content) if isinstance(content, dict) else {}
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file}: expected a dict of tensors, the weights of a naive PCT, but got {type(content)}")
    for prefix in ("backbone.", "encoder."):
        inside = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        state = inside or state
    # A file that keeps shared weights once has them under one of the two names.
    for block in ("sa1", "sa2", "sa3", "sa4"):
        names = [f"{block}.{part}_conv.weight" for part in "qk"]
        held = [state[name] for name in names if name in state]
        state |= dict(zip(names, held * 2, strict=True)) if len(held) == 1 else {}
    return state
