"""``python -m cswe.bench``: the command line without any of the command line's dependencies."""

import argparse
import json
import sys
from pathlib import Path

from cswe._extras import MissingExtraError
from cswe.bench import bench
from cswe.bench.cells import Setting
from cswe.bench.meter import measure_here


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m cswe.bench", description=bench.__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="small sizes, short runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU, if there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growth with N: .png, .svg, .pdf")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="measure nothing, print (and draw) a report")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # one measurement in a process of its own
    arguments = parser.parse_args()
    if arguments.cell:
        cell = json.loads(arguments.cell)
        result = measure_here(cell["operation"], cell["who"], Setting(**cell["setting"]), "cpu", cell["seconds"])
        print(json.dumps(result))
        return
    try:
        bench(arguments.quick, arguments.device, arguments.json, arguments.plot, arguments.markdown)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stdout = None
    except ValueError as error:
        parser.error(str(error))
    except (OSError, MissingExtraError) as error:  # not what was asked for: something failed on the way
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
