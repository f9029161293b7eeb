"""Moved to `trimtab.plan` (shared by engine and workers); import from there."""

from trimtab.plan import *  # noqa: F403
