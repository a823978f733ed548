"""From sets to vectors, as many as there are."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from cswe.training.inputs import Input
from cswe.training.model import Model
from cswe.training.outputs import open_writer


def embed_blocks(
    model: Model, sets: Input, *, batch_size: int = 256, device: str | torch.device = "cpu"
) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield the vectors ``(b, size)`` of one batch after another, on the CPU, and the ids of their sets."""
    where = torch.device(device)
    model = model.to(where).eval()
    for batch, ids in sets.batches(batch_size, where):
        with torch.no_grad():
            vectors = model.embed_batch(batch)
        yield vectors.float().cpu(), ids


def embed(
    model: Model,
    sets: Input,
    out: str | Path,
    *,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> int:
    """Write the vectors of all sets to a file; memory does not grow with their number.

    Parameters
    ----------
    model
        As `cswe.load` gives it.
    sets
        As `open_input` gives them: a store, or raw input through the model's backbone.
    out
        A file that ends in ``.npy`` (with the ids in ``.ids.txt`` beside it), ``.parquet`` or ``.h5``.
    batch_size, device
        Sets at a time, and where.
    progress
        Show a progress bar.

    Returns
    -------
    int
        The number of vectors.
    """
    count = 0
    with open_writer(Path(out), model.size) as writer, tqdm(total=len(sets), unit=" sets", disable=not progress) as bar:
        for vectors, ids in embed_blocks(model, sets, batch_size=batch_size, device=device):
            writer.write(vectors.numpy(), ids)
            count += len(ids)
            bar.update(len(ids))
    return count
