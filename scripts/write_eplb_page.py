"""Writes what docs/eplb.md takes from the code: the tables of settings, of support and of metrics.

.venv/bin/python scripts/write_eplb_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

from trimtab.experts.control.config import eplb_options
from trimtab.experts.control.support import support_table
from trimtab.observability.metrics import metrics_table

PAGE = Path(__file__).parents[1] / "docs/eplb.md"


def options_table() -> str:
    def written(default: object) -> str:
        return "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"

    rows = [f"| `{name}` | {written(default)} | {text} |" for name, (default, text) in eplb_options().items()]
    return "\n".join(["| key | default | what |", "|---|---|---|", *rows])


def with_tables(page: str) -> str:
    """The page with its generated parts as the code has them now."""
    for name, table in (("options", options_table()), ("support", support_table()), ("metrics", metrics_table())):
        part = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, count = part.subn(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page)
        assert count == 1, f"{PAGE} has {count} parts named {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
