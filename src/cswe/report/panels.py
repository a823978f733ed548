"""Figures of a page: small panels that flow, each an SVG that takes its colours from the page."""

import html
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cswe.report.style import INK, VARIABLES, save


@dataclass(frozen=True)
class Panel:
    """One small drawing.

    Parameters
    ----------
    name
        For files and ids.
    axes
        What was drawn on.
    told
        What is to be seen, for those who cannot see it.
    """

    name: str
    axes: Any
    told: str

    def svg(self) -> str:
        """Return the drawing for a page: colours by name, text as text, ids that clash with no other panel's."""
        import matplotlib

        stream = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            self.axes.figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = stream.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r'<style type="text/css">[^<]*</style>', "", text)
        text = re.sub(r"font-family: [^;\"]*;?", "", text)
        text = re.sub(r'( id="|url\(#|href="#)', rf"\1{self.name}-", text)
        for colour, name in VARIABLES.items():
            text = text.replace(colour, f"var(--{name})")
        opening = f'<svg role="img" aria-label="{html.escape(self.told)}" class="panel"'
        text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text, count=1)
        return re.sub(r"\s*\n\s*", " ", text.replace("<svg", opening, 1)).strip()


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a name, its colour, and whether its line is dashed."""

    name: str
    colour: str
    dashed: bool = False

    @property
    def variable(self) -> str:
        """The colour by its name in the style sheet."""
        return f"var(--{VARIABLES[self.colour]})"


@dataclass(frozen=True)
class Figure:
    """Panels that belong together, with one legend and one caption."""

    name: str
    caption: str
    panels: list[Panel]
    keys: list[Key] = field(default_factory=list)
    title: str = ""

    def save(self, folder: Path) -> list[Path]:
        """Write every panel as PNG and SVG, each with the legend, since files go about alone."""
        from matplotlib.lines import Line2D

        files = []
        for panel in self.panels:
            if self.keys:
                lines = [Line2D([], [], color=key.colour, ls="--" if key.dashed else "-", lw=1.8) for key in self.keys]
                panel.axes.figure.legend(
                    lines,
                    [key.name for key in self.keys],
                    loc="outside lower center",
                    ncols=min(3, len(self.keys)),
                    frameon=False,
                    fontsize=8,
                    labelcolor=INK,
                )
            files += save(panel.axes.figure, folder, panel.name)
        return files
