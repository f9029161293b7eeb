"""`docs/cases.md` says which test holds which public bug report: the tests exist, and they say so themselves."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (B\d+) \|.*\| (.+) \|$", re.MULTILINE)


def rows() -> dict[str, list[tuple[str, str]]]:
    """Case -> (file, test) of its row."""
    text = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
    return {case: re.findall(r"`([\w/.]+)::(\w+)`", cell) for case, cell in ROW.findall(text)}


def test_every_case_of_the_table_is_held_by_tests_that_exist_and_cite_it() -> None:
    assert len(rows()) > 30, "the table was not found"
    for case, tests in rows().items():
        assert tests, f"{case} has no test"
        for file, name in tests:
            source = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {name}(" in source, f"{case}: {file} has no {name}"
            assert re.search(rf"\b{case}\b", source), f"{case}: {file} does not cite it"


def test_every_case_that_a_test_cites_is_in_the_document() -> None:
    """Cases of rooms that are still to come (up to B77) join the table with their rooms."""
    document = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
    cited = {
        int(number)
        for file in (ROOT / "tests").rglob("test_*.py")
        for number in re.findall(r"\bB(\d{2,3})\b", file.read_text(encoding="utf-8"))
    }
    missing = [f"B{number}" for number in sorted(cited) if 79 <= number <= 127 and f"B{number}" not in document]
    assert not missing, missing
