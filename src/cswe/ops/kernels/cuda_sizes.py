"""Sizes of grids and tiles. Triton has these functions too, but calling its own from Python costs microseconds each."""


def cdiv(number: int, size: int) -> int:
    """Give how many pieces of a size a number makes.

    Examples
    --------
    >>> cdiv(8, 4), cdiv(9, 4)
    (2, 3)
    """
    return -(-number // size)


def in_parts(items: int, most: int) -> tuple[int, int]:
    """Cut items into at most so many parts: how many items a part has, and how many parts that makes.

    Examples
    --------
    >>> in_parts(10, 4), in_parts(3, 8)
    ((3, 4), (1, 3))
    """
    each = cdiv(items, max(1, min(items, most)))
    return each, cdiv(items, each)


def power_of_two(number: int) -> int:
    """Give the smallest power of two that is not below a number.

    Examples
    --------
    >>> power_of_two(1), power_of_two(8), power_of_two(9)
    (1, 8, 16)
    """
    return 1 << max(0, number - 1).bit_length()
