"""Results on disk: one JSON file a study, a line for every cell, so that a new cell is a new line."""

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from cswe.training.cells import Result
from cswe.training.checkpoint import read_json, replace_text
from cswe.training.errors import UserError
from cswe.training.locking import locked

FORMAT = "cswe-study"
EXTRACTION = "extraction"
RESULTS = Path(__file__).parent / "results"


def add_known(parser: ArgumentParser, what: str) -> None:
    """Give a command the option that says from which folders what it writes starts."""
    parser.add_argument(
        "--known", type=_folder, nargs="*", default=[RESULTS], help=f"folders with {what} to start from"
    )


def _folder(text: str) -> Path:
    # Without a word, a folder that is misspelt would be one in which nothing is known.
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"expected a folder that is there but got {text}")
    return Path(text)


def read_study(folder: Path, study: str) -> dict[str, Result]:
    """Return the results of a study by the names of their cells; empty if there is no file."""
    file = folder / f"{study}.json"
    if not file.exists():
        return {}
    found = file.stat()
    return dict(_parsed(file, found.st_mtime_ns, found.st_size, found.st_ino))


@lru_cache(maxsize=64)
def _parsed(file: Path, *version: int) -> dict[str, Result]:
    """Read a file once for each version of it: workers look at all of them before every cell."""
    return {result.cell.name: result for result in (Result.from_json(line, file) for line in read_lines(file, "cells"))}


def read_all(folders: Iterable[Path], study: str) -> dict[str, Result]:
    """Return the results of a study in several folders; what an earlier one has counts."""
    found: dict[str, Result] = {}
    for folder in folders:
        found = {**read_study(folder, study), **found}
    return found


def add_result(folder: Path, study: str, result: Result, known: dict[str, Result], lock: Path) -> None:
    """Add a result to a study's file, which starts from what is known: the file is always the whole study so far."""
    with locked(lock):
        results = {**known, **read_study(folder, study), result.cell.name: result}
        lines = [results[name].to_json() for name in sorted(results)]
        write_lines(folder / f"{study}.json", {"study": study}, "cells", lines)


def read_extractions(folder: Path) -> list[dict[str, Any]]:
    """Return how long each store took to make."""
    return read_lines(folder / f"{EXTRACTION}.json", "stores")


def add_extraction(folder: Path, entry: dict[str, Any], known: Iterable[Path], lock: Path) -> None:
    """Note how long a store took to make; the file starts from what some folders have, as that of a study does."""
    with locked(lock):
        places = reversed([folder, *known])  # what an earlier one has counts
        found = {line["store"]: line for place in places for line in read_extractions(place)}
        found[entry["store"]] = entry
        lines = [found[name] for name in sorted(found)]
        write_lines(folder / f"{EXTRACTION}.json", {"study": EXTRACTION}, "stores", lines)


def read_lines(file: Path, name: str) -> list[dict[str, Any]]:
    """Return what a file lists under a name; nothing if there is no file."""
    if not file.exists():
        return []
    content = read_json(file)
    if content.get("format") != FORMAT or not isinstance(content.get(name), list):
        raise UserError(f"{file}: expected the results of a study but got something else")
    return list(content[name])


def write_lines(file: Path, head: dict[str, Any], name: str, lines: list[dict[str, Any]]) -> None:
    """Write a list, a line for every entry, aside and put it in place."""
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in {"format": FORMAT, **head}.items()]
    body = ",\n".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines)
    replace_text(file, "{" + " ".join(parts) + f' "{name}": [\n{body}\n]}}\n')
