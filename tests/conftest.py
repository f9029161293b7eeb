"""What several test folders share: the demo model, built once into the user's cache and found there afterwards."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo checkpoint as users get it. Tests that take it are marked `demo`."""
    from trimtab.models.demo import ensure_demo

    return ensure_demo()


@pytest.fixture(scope="session")
def demo_noisy_path() -> Path:
    """The demo checkpoint with experts so unlike one another that a swapped one shows in the text."""
    from trimtab.models.demo import ensure_demo

    return ensure_demo(noise=0.5)
