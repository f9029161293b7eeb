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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A hang is one after five minutes (pyproject.toml), except where 135 M parameters run through two libraries: on a
    machine that has other work that may take as long."""
    for item in items:
        if item.get_closest_marker("demo") is not None:
            item.add_marker(pytest.mark.timeout(900))
