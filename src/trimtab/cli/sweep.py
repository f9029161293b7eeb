"""`trimtab sweep`: every architecture of the installed transformers, tried with a tiny random checkpoint."""

from __future__ import annotations

from pathlib import Path


def sweep(*, markdown: Path | None = None, only: list[str] | None = None) -> int:
    """Try every architecture of the installed transformers that has experts, and say which work and why others do not.

    Each one gets a tiny random checkpoint, a packed and chunked batch, and transformers' own fp32 answers to compare.
    """
    raise NotImplementedError
