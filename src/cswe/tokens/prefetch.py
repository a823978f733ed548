"""Batches made ready by a thread while the device is at work."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

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
    ready: queue.Queue[tuple[Batch, torch.cuda.Event | None] | BaseException | None] = queue.Queue(_AHEAD)
    stopped = threading.Event()
    cuda = device.type == "cuda"
    stream = torch.cuda.Stream(device) if cuda else None

    def put(entry: tuple[Batch, torch.cuda.Event | None] | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put(entry, timeout=0.1)
            except queue.Full:
                continue

    def fill() -> None:
        try:
            for indices in order:
                if stopped.is_set():
                    return
                with torch.cuda.stream(stream):
                    batch = gather(indices).to(device, dtype)
                    event = None if stream is None else stream.record_event()
                put((batch, event))
            put(None)
        except BaseException as error:  # handed to the consumer, who raises it
            put(error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        while (entry := ready.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            batch, event = entry
            if event is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(event)
                for values in batch.tensors():
                    # Memory made on the copying stream must not be reused there while this stream reads it.
                    values.record_stream(current)
            yield batch
    finally:
        stopped.set()
        thread.join()
