"""docs/eplb.md says what the code does: its tables are made from the code, and what it names exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/eplb.md").read_text(encoding="utf-8")


def test_tables_of_settings_support_and_metrics_are_those_of_the_code() -> None:
    script = runpy.run_path(str(ROOT / "scripts/write_eplb_page.py"))
    assert script["with_tables"](PAGE) == PAGE, "run .venv/bin/python scripts/write_eplb_page.py"


def test_every_file_and_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks|scripts)/[\w./-]+?)(?:::(\w+))?`", PAGE)
    assert len(named) > 60
    missing = [path for path, _ in named if not (ROOT / path).exists()]
    assert not missing, missing
    for path, test in named:
        if test:
            assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {test}"


def test_all_eighteen_rules_have_a_row_and_a_test_that_is_named_after_them() -> None:
    rows = re.findall(r"^\| (\d+)\. (.*)$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 19))
    for number, row in rows:
        assert f"::test_rule_{int(number):02d}_" in row, f"rule {number} has no test named after it in its row"
