"""The version: pyproject.toml reads it here, and pages carry it."""

__version__ = "0.2.0"
