"""What several of these tests need."""

import pytest


class Scored:
    """A result as a search sees it."""

    def __init__(self, cell, value):
        self.cell, self.error = cell, None
        self.scores = {"validation": {"top1": value}}


@pytest.fixture
def scored():
    """Make results as a search sees them, of a cell and a score."""
    return Scored
