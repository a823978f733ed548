"""Items made ready by a thread, ahead of whoever takes them."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterable[T], most: float, weight: Callable[[T], float] = lambda _: 1) -> Generator[T, None, None]:
    """Yield items in order, made by a thread while the caller is busy with earlier ones.

    What making one raises is raised here, after the items before it. Closed, the generator lets the thread finish what
    it is making, and waits for it.

    Parameters
    ----------
    items
        Where they come from; only the thread draws from it.
    most
        How much may wait at a time. A single item may weigh more.
    weight
        What an item counts for.

    Examples
    --------
    >>> list(ahead((n * n for n in range(5)), most=2))
    [0, 1, 4, 9, 16]
    """
    waiting: deque[tuple[T, float]] = deque()
    change = threading.Condition()
    load = 0.0
    stopped = ended = False
    failure: BaseException | None = None

    def fill() -> None:
        nonlocal load, ended, failure
        try:
            for item in items:
                added = weight(item)
                with change:
                    while not stopped and waiting and load + added > most:
                        change.wait()
                    if stopped:
                        return
                    waiting.append((item, added))
                    load += added
                    change.notify_all()
                del item  # it is the caller's now: held here until the next is made, it would be one more in memory
        except BaseException as error:  # raised where items are taken
            failure = error
        finally:
            with change:
                ended = True
                change.notify_all()

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        while True:
            with change:
                while not waiting and not ended:
                    change.wait()
                if not waiting:
                    break
                taken, freed = waiting.popleft()
                load -= freed
                change.notify_all()
            yield taken
            del taken
        if failure is not None:
            raise failure
    finally:
        with change:
            stopped = True
            change.notify_all()
        thread.join()
