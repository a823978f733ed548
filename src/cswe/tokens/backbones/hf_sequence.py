"""Protein language models and text encoders: a token for every residue or word piece, without the special ones."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from cswe._extras import require
from cswe.tokens.backbones.base import (
    Backbone,
    Encoded,
    Norm,
    Precision,
    check_choice,
    finite_items,
    stored_type,
)
from cswe.tokens.backbones.hugging_face import Encoder
from cswe.tokens.errors import BadItemError

Long = Literal["cut", "window"]
# Models that count positions from the padding's number on, and so have two fewer than they say.
_SHIFTED = (
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "longformer",
    "luke",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
_USUAL = str.maketrans("", "", "ACDEFGHIKLMNPQRSTVWY")


@dataclass
class Tokenized:
    """The windows of one sequence, each a list of token numbers without special ones, and what was counted."""

    windows: list[list[int]]
    counts: Counter[str]


class SequencePreparer:
    """Turns text into token numbers, as the model's own tokenizer says.

    Parameters
    ----------
    tokenizer
        A tokenizer of the transformers library.
    length
        Most tokens that the model takes, without the special ones.
    long
        What becomes of a longer sequence: ``"cut"``, its first part is kept; ``"window"``, it is split into windows of
        about equal length, which the model sees one by one.
    protein
        Whether unusual residues are to be counted.
    """

    def __init__(self, tokenizer: Any, *, length: int, long: Long, protein: bool) -> None:
        check_choice("long", long, Long)
        self._tokenizer = tokenizer
        self.length = length
        self.long = long
        self.protein = protein

    def one(self, raw: str) -> Tokenized:
        """Tokenize one sequence."""
        counts: Counter[str] = Counter()
        if self.protein:
            counts.update(f"residue {letter}" for letter in "".join(raw.split()).translate(_USUAL))
        numbers = self._tokenizer(raw, add_special_tokens=False, verbose=False)["input_ids"]
        if not numbers:
            raise BadItemError("has no tokens")
        if self.protein and len(numbers) != len("".join(raw.split())):
            # The tokenizer reads neighbouring letters that it does not know as one token.
            counts["sequences with fewer tokens than residues"] += 1
        elif not self.protein and (unknown := numbers.count(self._tokenizer.unk_token_id)):
            counts["unknown tokens"] += unknown
        if len(numbers) <= self.length:
            return Tokenized([numbers], counts)
        if self.long == "cut":
            counts["sequences cut"] += 1
            counts["tokens cut off"] += len(numbers) - self.length
            return Tokenized([numbers[: self.length]], counts)
        counts["sequences windowed"] += 1
        count = -(-len(numbers) // self.length)
        edges = [len(numbers) * part // count for part in range(count + 1)]
        return Tokenized([numbers[edges[part] : edges[part + 1]] for part in range(count)], counts)

    def pack(self, prepared: list[Tokenized]) -> list[Tokenized]:
        """Leave them as they are: they are small."""
        return prepared


class SequenceBackbone(Backbone):
    """ESM-2 of any size, BERT, RoBERTa, a T5 encoder … of the transformers library.

    Tokens are those of the sequence itself; CLS is the hidden state at the first position (BOS in ESM), if the
    tokenizer puts a special token there. Of a windowed sequence the CLS is the mean over its windows.

    Parameters
    ----------
    name
        A folder, or a name on the hub.
    layers, norm, precision, device, revision
        As in `Encoder`.
    batch_tokens
        Most tokens in a batch, padding included.
    long, max_length
        What becomes of long sequences, see `SequencePreparer`; and the length from which on they are long, by default
        the model's own limit.
    """

    kind = "sequence"

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
        long: Long = "cut",
        max_length: int | None = None,
    ) -> None:
        self._encoder = Encoder(name, layers=layers, norm=norm, precision=precision, device=device, revision=revision)
        self.device = self._encoder.device
        transformers = require("transformers", "data")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                name, revision=revision, local_files_only=Path(name).is_dir()
            )
        except Exception as error:  # the tokenizers library raises nothing more special
            kind, reason = self._encoder.config.model_type, " ".join(str(error).split())[:200]
            raise ValueError(
                f"backbone: expected a model for sequences but got {name!r}, of type {kind}, whose tokenizer could not "
                f"be read: {reason}"
            ) from None
        self._before, self._after, content = _special_tokens(tokenizer)
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        limit = _length_limit(tokenizer, self._encoder.config) - len(self._before) - len(self._after)
        if max_length is not None and not 0 < max_length <= limit:
            raise ValueError(f"max_length: expected at most {limit}, the model's limit, but got {max_length}")
        protein = self._encoder.config.model_type == "esm"
        self.preparer: SequencePreparer = SequencePreparer(
            tokenizer, length=max_length or limit, long=long, protein=protein
        )
        self._batch_tokens = batch_tokens
        self.has_cls = bool(self._before)
        self.layers = dict.fromkeys(self._encoder.layers, self._encoder.dim)
        self._encoder.settle(**self._inputs([content]))

    def _inputs(self, windows: list[list[int]]) -> dict[str, Tensor]:
        longest = max(map(len, windows)) + len(self._before) + len(self._after)
        numbers = torch.full((len(windows), longest), self._pad, dtype=torch.int64)
        mask = torch.zeros(len(windows), longest, dtype=torch.int64)
        for row, window in enumerate(windows):
            full = [*self._before, *window, *self._after]
            numbers[row, : len(full)] = torch.tensor(full)
            mask[row, : len(full)] = 1
        return {"input_ids": numbers.to(self.device), "attention_mask": mask.to(self.device)}

    def encode(self, units: Sequence[Any], dtype: str) -> Encoded:
        """Encode sequences, those of like length together."""
        items: list[Tokenized] = [item for unit in units for item in unit]
        windows = [window for item in items for window in item.windows]
        owner = [position for position, item in enumerate(items) for _ in item.windows]
        pieces: dict[int, list[Tensor]] = {layer: [torch.empty(0)] * len(windows) for layer in self.layers}
        cls = {layer: torch.zeros(len(items), dim) for layer, dim in self.layers.items()} if self.has_cls else {}
        finite = torch.ones(len(items), dtype=torch.bool)
        for batch in self._batches(windows):
            chosen = [windows[position] for position in batch]
            hidden = self._encoder.hidden(**self._inputs(chosen))
            lengths = torch.tensor([len(window) for window in chosen], device=self.device)
            steps = torch.arange(int(lengths.max()), device=self.device)
            content = steps < lengths[:, None]
            for layer in self.layers:
                inner = hidden[layer][:, len(self._before) : len(self._before) + len(steps)]
                stored = inner[content].to(stored_type(dtype))
                good = finite_items(stored, lengths).tolist()
                for position, tokens, fine in zip(batch, stored.cpu().split(lengths.tolist()), good, strict=True):
                    pieces[layer][position] = tokens
                    finite[owner[position]] &= fine
                for position, vector in zip(batch, hidden[layer][:, 0].float().cpu(), strict=True):
                    if self.has_cls:
                        whole = owner[position]
                        cls[layer][whole] += vector / len(items[whole].windows)
        stored_cls = {layer: vectors.to(stored_type(dtype)) for layer, vectors in cls.items()}
        for vectors in stored_cls.values():
            finite &= torch.isfinite(vectors).all(1)
        counts: Counter[str] = Counter()
        for item in items:
            counts.update(item.counts)
        total = [sum(map(len, item.windows)) for item in items]
        return Encoded(pieces, total, finite, cls=stored_cls, counts=dict(counts))

    def _batches(self, windows: list[list[int]]) -> list[list[int]]:
        extra = len(self._before) + len(self._after)
        batches: list[list[int]] = []
        # Longest first: the first batch is the largest, so that memory is found to be too small at once.
        for position in sorted(range(len(windows)), key=lambda index: -len(windows[index])):
            last = batches[-1] if batches else []
            if last and (len(last) + 1) * (len(windows[last[0]]) + extra) <= self._batch_tokens:
                last.append(position)
            else:
                batches.append([position])
        return batches

    def describe(self) -> dict[str, Any]:
        """Return the manifest's notes."""
        return {**self._encoder.describe(), "batch_tokens": self._batch_tokens, "group": self.group}

    def preprocessing(self) -> dict[str, Any]:
        """Return how sequences were prepared."""
        return {"max_length": self.preparer.length, "long": self.preparer.long, "special_tokens": "removed"}


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Find out what the tokenizer puts before and after a text, by showing it one."""
    content = tokenizer("A", add_special_tokens=False)["input_ids"]
    full = tokenizer("A")["input_ids"]
    for start in range(len(full) - len(content) + 1):
        if full[start : start + len(content)] == content:
            return full[:start], full[start + len(content) :], content
    raise ValueError(f"backbone: cannot tell the special tokens of {type(tokenizer).__name__}: {full} and {content}")


def _length_limit(tokenizer: Any, config: Any) -> int:
    limits = [int(min(tokenizer.model_max_length, 2**20))]
    positions = getattr(config, "max_position_embeddings", None)
    if positions:
        limits.append(int(positions) - (2 if config.model_type in _SHIFTED else 0))
    return min(limits)
