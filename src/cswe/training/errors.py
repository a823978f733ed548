"""What goes wrong with a run, in words that say what to do."""

from cswe.tokens.errors import TokenStoreError


class UserError(ValueError):
    """What was asked for does not fit: an argument, a recipe, a store. Nothing was computed."""


class UnreadableError(UserError):
    """A file is not there, or damaged: what it held can only be computed again."""


class TrainingError(RuntimeError):
    """A run failed on its way; the last good checkpoint is kept."""


class PausedError(Exception):
    """A run was broken off on request, after an epoch; the same call with the same folder goes on with it."""


def is_own_fault(error: Exception) -> bool:
    """Say whether an error is the fault of one run's choices, so that runs with others may be all right.

    Others would fare alike with a damaged store, or with what was asked for of all of them and looked at before.

    Examples
    --------
    >>> is_own_fault(TrainingError("the loss became nan")), is_own_fault(UserError("no such split"))
    (True, False)
    """
    return isinstance(error, TrainingError | ValueError) and not isinstance(error, TokenStoreError | UserError)
