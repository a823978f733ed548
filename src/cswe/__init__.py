"""Pool sets of vectors by (constrained) sliced Wasserstein embedding."""

__version__ = "0.1.0"
