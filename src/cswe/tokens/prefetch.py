"""Batches made ready by a thread while the device is at work."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import torch

from cswe.tokens.ahead import ahead
from cswe.tokens.gather import Batch, Indices

_AHEAD = 3


def prefetched(
    order: Sequence[Indices],
    gather: Callable[[Indices], Batch],
    device: torch.device,
    dtype: torch.dtype | None,
) -> Iterator[Batch]:
    """Yield the batches of `order`, gathered and sent to the device ahead of time by one thread.

    The thread copies from pinned memory on a stream of its own, so that the copy overlaps with training; the
    consumer's stream waits for the copy, the host does not.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def sent() -> Iterator[tuple[Batch, torch.cuda.Event | None]]:
        for indices in order:
            with torch.cuda.stream(stream):
                batch = gather(indices).to(device, dtype)
                event = None if stream is None else stream.record_event()
            yield batch, event

    with closing(ahead(sent(), _AHEAD)) as ready:
        for batch, event in ready:
            if event is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(event)
                for values in batch.tensors():
                    # Memory made on the copying stream must not be reused there while this stream reads it.
                    values.record_stream(current)
            yield batch
