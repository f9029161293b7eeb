"""What is kept for programs and what people read of it."""

from __future__ import annotations

import logging

import pytest

from trimtab.observability.events import EventLog


def test_an_event_is_one_line_of_its_numbers_and_one_per_line_of_text(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    with caplog.at_level(logging.INFO, "trimtab.events"):
        log("began", {"transaction": 1, "gain": 0.123456, "changes": ["2 slots", "layer 0: expert 1 moves"]})
    (record,) = caplog.records
    assert record.getMessage().splitlines() == [
        "began: transaction 1, gain 0.1235", "    2 slots", "    layer 0: expert 1 moves",
    ]  # fmt: skip
    (event,) = log.recent()
    assert event["event"] == "began" and event["changes"][1] == "layer 0: expert 1 moves" and event["time_s"] > 0


def test_aborts_and_failures_are_warnings_with_layer_rank_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    with caplog.at_level(logging.DEBUG, "trimtab.events"):
        log("aborted", {"transaction": 1, "reason": "a bad checksum", "layer": 3, "rank": 1, "changes": []})
        log("policy_failed", {"reason": "no idea"})
        log("refit_ended", {"weights_version": 1, "problem": "a file is missing"})
        log("refit_ended", {"weights_version": 1, "problem": ""})
        log("committed", {"layer": 1})
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "WARNING", "WARNING", "INFO", "DEBUG"]
    assert caplog.records[0].getMessage() == "aborted: transaction 1, reason a bad checksum, layer 3, rank 1"


def test_only_the_latest_events_are_kept() -> None:
    log = EventLog(capacity=2)
    for number in range(4):
        log("committed", {"layer": number})
    assert [event["layer"] for event in log.recent()] == [2, 3]
