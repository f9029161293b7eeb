"""What the journeys of live balancing that share a model ask for; a module's own fixture of that name goes before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from eplb_watch import FEW_PROMPTS, FEW_TOKENS, LIMITS, nothing_is_left

from trimtab import LLM
from trimtab.outputs import RequestOutput
from trimtab.testing.checkpoints import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of three layers."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("mixtral"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[RequestOutput]:
    """One rank's outputs for FEW_PROMPTS."""
    with LLM(str(checkpoint), **LIMITS) as llm:
        return llm.generate(FEW_PROMPTS, FEW_TOKENS, use_tqdm=False)


@pytest.fixture
def leaves_nothing(tmp_path: Path, checkpoint: Path, expected: list[RequestOutput]) -> Iterator[None]:
    """Everything that the test started has ended, beside what the fixtures above keep."""
    with nothing_is_left(tmp_path):
        yield
