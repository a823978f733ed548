"""Random numbers that are a function of what they are for.

Every draw has a generator of its own, made from (seed, purpose, epoch, step): a run that was broken off draws what it
would have drawn, and the global generator is left alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cswe.tokens.randomness import random_keys


def seed_for(*key: int | str) -> int:
    """Return the seed that belongs to a key.

    Examples
    --------
    >>> seed_for("dropout", 0, 3) == seed_for("dropout", 0, 3) != seed_for("dropout", 1, 3)
    True
    """
    return int(random_keys(1, *key)[0] >> 1)


def generator_for(device: torch.device, *key: int | str) -> torch.Generator:
    """Return a generator that belongs to a key."""
    return torch.Generator(device).manual_seed(seed_for(*key))


@contextmanager
def global_seed(*key: int | str) -> Iterator[None]:
    """Seed the global CPU generator, which modules draw their first weights from; put it back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_for(*key))
        yield
