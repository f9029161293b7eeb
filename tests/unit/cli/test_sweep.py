"""`trimtab sweep` prints a line per architecture, writes the table, and fails when one neither works nor is refused."""

import pytest

import trimtab.models.sweep as sweeping
from trimtab.cli.sweep import sweep
from trimtab.models.sweep import SweepRow

WORKS = SweepRow("mixtral", "MixtralForCausalLM", "works")
REFUSED = SweepRow("jamba", "JambaForCausalLM", "refused", "state layers")
DIFFERS = SweepRow("new_moe", "NewMoeForCausalLM", "differs", "logits differ")


@pytest.fixture
def rows(monkeypatch):
    found = {row.model_type: row for row in (WORKS, REFUSED, DIFFERS)}

    def run_sweep(names, progress):
        chosen = [found[name] for name in names or found]
        for done, row in enumerate(chosen, 1):
            progress(done, len(chosen), row)
        return chosen

    monkeypatch.setattr(sweeping, "sweep_names", lambda: sorted(found))
    monkeypatch.setattr(sweeping, "run_sweep", run_sweep)


def test_each_architecture_gets_a_line_and_the_table_a_file(rows, capsys, tmp_path):
    table = tmp_path / "docs" / "table.md"
    assert sweep("mixtral", "jamba", markdown=table) == 0
    printed = capsys.readouterr().out
    assert "mixtral: works\n" in printed
    assert "jamba: refused state layers\n" in printed
    assert "1 works, 1 refused" in printed
    assert "| jamba | JambaForCausalLM | refused | state layers |" in table.read_text()


def test_other_logits_than_transformers_fail_the_command(rows):
    assert sweep() == 1


def test_a_model_type_that_is_not_there_is_named(rows):
    with pytest.raises(ValueError, match=r"model type \(gpt2\) has no experts plug point; there are jamba, mixtral"):
        sweep("gpt2")
