"""Optional dependencies, imported where they are used."""

import importlib
from types import ModuleType


class MissingExtraError(ImportError):
    """An optional dependency is needed and not installed."""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it.

    Parameters
    ----------
    module
        The module to import, ``"h5py"`` say.
    extra
        The extra of this package that installs it, ``"data"`` say.

    Examples
    --------
    >>> require("math", extra="data").floor(2.5)
    2
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name.split(".")[0]):
            raise  # the dependency is there, something that it needs is not: a different problem
        raise MissingExtraError(
            f"this needs the package {error.name!r}, which is not installed: pip install 'cswe[{extra}]'"
        ) from error
