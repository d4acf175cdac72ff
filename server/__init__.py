"""The composition root: settings in, a serving process out."""

__version__ = "0.1.0"
