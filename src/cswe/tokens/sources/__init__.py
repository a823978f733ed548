"""Data sets. `open_source` finds out which one a path is."""

from cswe.tokens.sources.base import Points, Source
from cswe.tokens.sources.opening import FORMATS, Format, SourceOptions, open_source

__all__ = ["FORMATS", "Format", "Points", "Source", "SourceOptions", "open_source"]
