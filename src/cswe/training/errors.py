"""What goes wrong with a run, in words that say what to do."""


class UserError(ValueError):
    """What was asked for does not fit: an argument, a recipe, a store. Nothing was computed."""


class UnreadableError(UserError):
    """A file is not there, or damaged: what it held can only be computed again."""


class TrainingError(RuntimeError):
    """A run failed on its way; the last good checkpoint is kept."""


class PausedError(Exception):
    """A run was broken off on request, after an epoch; the same call with the same folder goes on with it."""
