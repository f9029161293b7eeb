"""The demo model's tokens and routed experts: the same from both runners, and while experts move between ranks."""

from pathlib import Path

import pytest
from capture_job import demo_prompts, run_job

pytestmark = pytest.mark.demo


def test_both_runners_agree_and_moving_experts_change_nothing(demo_path: Path) -> None:
    """`make capture-job` runs the same with 200 prompts."""
    report = run_job(demo_path, demo_prompts(20), max_tokens=4)
    assert report["V2, 2 ranks, experts moving"]["moves"] > 0
    assert report["rows"] > 300 and report["different_tokens"] > 20
    assert report["experts_chosen"] == 8 and report["greatest_share_of_an_expert"] < 0.5, "choices that mean something"
