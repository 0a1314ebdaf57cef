"""The version: pyproject.toml reads it here, and saved files and pages carry it."""

__version__ = "0.2.0"
