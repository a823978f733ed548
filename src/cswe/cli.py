"""The command `cswe`. A command is a function; its arguments and its docstring are the command line."""

import importlib
import sys
import warnings
from collections.abc import Sequence

import tyro

from cswe import __version__
from cswe._extras import MissingExtraError
from cswe.tokens.errors import TokenStoreError

# name: (function, what it does). A function is imported when its command is used, so that help is quick.
COMMANDS: dict[str, tuple[str, str]] = {
    "extract": ("cswe.tokens.commands:extract", "run a frozen backbone over a data set once, and keep its tokens"),
    "inspect": ("cswe.tokens.commands:inspect", "say what is in a store, and check it"),
    "train": ("cswe.training.commands:train", "train a pool and a head on a store"),
    "evaluate": ("cswe.training.commands:evaluate", "say how good a model is on a store"),
    "compare": ("cswe.training.study_commands:compare", "train many poolings with many seeds, and print tables"),
    "sweep": ("cswe.training.study_commands:sweep", "search the choices of a recipe by validation"),
    "report": ("cswe.report.commands:report", "write up runs as one HTML page"),
    "embed": ("cswe.training.vector_commands:embed", "turn sets into vectors"),
    "neighbors": ("cswe.training.vector_commands:neighbors", "find the nearest items of a store"),
    "explain": ("cswe.training.vector_commands:explain", "say which tokens speak for an answer"),
    "bench": ("cswe.bench:bench", "time and memory of every way to compute the relaxed SWGG, on this machine"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status.

    Examples
    --------
    >>> main(["--version"])
    cswe 0.1.0
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name in ("--version", "-V"):
        print(f"cswe {__version__}")
        return 0
    if name in ("--help", "-h"):
        print(_help())
        return 0
    if name not in COMMANDS:
        print(f"cswe: expected one of {', '.join(COMMANDS)} but got {name!r}\n\n{_help()}", file=sys.stderr)
        return 2
    path, _, function = COMMANDS[name][0].partition(":")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"cswe {name}: warning: {message}", file=sys.stderr)
            module = importlib.import_module(path)
            # A command may want to see its arguments before they are read: defaults that depend on them.
            prepare = getattr(module, f"prepare_{function}", None)
            command = getattr(module, function) if prepare is None else prepare(given[1:])
            tyro.cli(command, args=given[1:], prog=f"cswe {name}")
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stdout = None
        return 0
    except (ValueError, OSError, RuntimeError, MissingExtraError) as error:
        print(f"cswe {name}: {error}", file=sys.stderr)
        # What was asked for is wrong, and asking again will not help; or something failed on the way.
        return 2 if isinstance(error, ValueError) and not isinstance(error, TokenStoreError) else 1
    except KeyboardInterrupt as stop:
        print(f"cswe {name}: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        ["usage: cswe COMMAND …", "", *lines, "", "cswe COMMAND --help tells more; cswe --version, the version."]
    )
