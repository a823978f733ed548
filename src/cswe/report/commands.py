"""The command `cswe report`."""

from pathlib import Path
from typing import Annotated

import tyro

from cswe.report.gather import gather
from cswe.report.page import build_page


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path | None = None,
    store: Path | None = None,
    title: str = "Comparison of poolings",
    metric: str | None = None,
    slices: int | None = None,
    figures: bool = True,
) -> None:
    """Write up runs as one HTML page that needs no network, with every figure as SVG and PNG beside it.

    Example: cswe report study/

    Parameters
    ----------
    runs
        Folders of `cswe compare` or of `cswe train`, in any mixture.
    out
        The page's folder; by default report/ in the first run's.
    store
        The tokens that the runs were trained on, for the profiles of classes; by default where a comparison found them.
    title
        The page's title.
    metric
        The score to show: top1, top5, macro_f1, balanced, nearest; f_max; r2.
    slices
        The number of slices at which runs are looked at closely; by default 16, or the nearest there is.
    figures
        Write every figure as SVG and PNG, too.
    """
    page = build_page(gather(list(runs), store), title=title, metric=metric, slices=slices)
    files = page.write(out or runs[0] / "report", figures=figures)
    print(page.summary)
    print(f"{files[0]}" + (f", and {len(files) - 1} figures beside it" if figures else ""))
