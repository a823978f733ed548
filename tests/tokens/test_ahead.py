import threading
from contextlib import closing

import pytest

from cswe.tokens.ahead import ahead

LONG = 30.0  # seconds that nothing here takes unless it hangs


def test_the_next_is_made_while_the_caller_is_busy():
    made = threading.Event()

    def items():
        yield 1
        yield 2
        made.set()
        yield 3

    with closing(ahead(items(), most=2)) as stream:
        assert next(stream) == 1
        assert made.wait(LONG)  # nobody has asked for the third
        assert list(stream) == [2, 3]


@pytest.mark.parametrize(("most", "weight", "expected"), [(3, lambda item: 1, 3), (5, lambda item: 2, 2), (1, None, 1)])
def test_no_more_waits_than_may(most, weight, expected):
    begun = []
    blocked = threading.Event()

    def items():
        for item in range(10):
            begun.append(item)
            if len(begun) == expected + 1:  # so many wait, and this one is in the thread's hand
                blocked.set()
            yield item

    stream = ahead(items(), most) if weight is None else ahead(items(), most, weight)
    with closing(stream):
        assert next(stream) == 0
        assert blocked.wait(LONG)
        threading.Event().wait(0.05)  # time to go on, if anything let it
        assert len(begun) <= 1 + expected + 1
        assert list(stream) == list(range(1, 10))


def test_an_item_that_weighs_too_much_comes_alone():
    assert list(ahead(range(4), most=1, weight=lambda item: 100)) == [0, 1, 2, 3]


def test_an_error_comes_after_the_items_before_it():
    def items():
        yield 1
        raise OSError("the disk is gone")

    stream = ahead(items(), most=5)
    assert next(stream) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closed_it_leaves_no_thread_behind(taken):
    before = threading.active_count()
    closed = []

    def items():
        try:
            yield from range(100)
        finally:
            closed.append(True)

    source = items()
    with closing(source), closing(ahead(source, most=1)) as stream:
        for _ in range(taken):
            next(stream)
    assert threading.active_count() == before
    assert closed == ([True] if taken else [])  # one that never began has nothing to close
