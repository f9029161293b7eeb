"""What a model folder can be refused for: it cannot be run, or its files are not sound."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model is of a kind that cannot be run correctly here; the message names it and the reason."""


class CheckpointError(ValueError):
    """A file of the checkpoint is missing, damaged or disagrees with the configuration; the message names it."""
