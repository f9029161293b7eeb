"""The policy's process: what it answers, and what comes of policies that fail."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trimtab.experts.control.policy.base import PolicySettings
from trimtab.experts.control.policy.default import DefaultPolicy
from trimtab.experts.control.policy.process import InlinePolicy, PolicyProcess
from trimtab.experts.control.policy.registry import make_policy
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology

TOPOLOGY = Topology(4, 0, 2)
START = Placement(TOPOLOGY, [[0, 1, 2, 3], [3, 2, 1, 0]])
LOAD = ExpertLoad(np.array([[90, 80, 1, 2], [90, 80, 1, 2]]), 10)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def processes() -> Iterator[list[PolicyProcess]]:
    opened: list[PolicyProcess] = []
    yield opened
    for process in opened:
        process.close()


def start(processes: list[PolicyProcess], name: str, clock: Clock | None = None) -> PolicyProcess:
    process = PolicyProcess(name, PolicySettings(), 10.0, clock or Clock())
    processes.append(process)
    return process


def answer(process: PolicyProcess, load: ExpertLoad = LOAD, current: Placement = START) -> Placement | str:
    process.submit(load, current)
    return wait_for_answer(process)


def wait_for_answer(process: PolicyProcess) -> Placement | str:
    """Waits as an engine does not."""
    while (found := process.poll()) is None:
        assert process._process is not None and process._process.stdout is not None
        select.select([process._process.stdout], [], [], 0.05 if process._unsent else 60.0)
    return found


def test_the_process_answers_as_the_policy_does(processes: list[PolicyProcess]) -> None:
    process = start(processes, "default")
    assert process.poll() is None and process._process is None  # nothing runs before it is needed
    expected = DefaultPolicy(PolicySettings()).rebalance(LOAD, START)
    assert answer(process) == expected != START
    pid = process._process.pid  # type: ignore[union-attr]
    assert answer(process) == expected and process._process.pid == pid  # type: ignore[union-attr]


def test_submitting_more_than_a_pipe_holds_does_not_wait(processes: list[PolicyProcess]) -> None:
    """B37: the step that asks is not held up, whatever the model's size."""
    topology = Topology(256, 32, 32)
    rng = np.random.default_rng(0)
    load, current = ExpertLoad(rng.integers(0, 1000, (58, 256)), 10), Placement.initial(topology, 58)
    process = start(processes, "default")
    answer(process)
    child = process._process
    assert child is not None
    child.send_signal(signal.SIGSTOP)  # reads nothing
    process.submit(load, current)
    assert process._unsent and process.poll() is None  # the rest follows with each poll
    child.send_signal(signal.SIGCONT)
    assert isinstance(wait_for_answer(process), Placement)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("odd_policies:Raising", "the policy raised RuntimeError: no idea"),
        ("odd_policies:RaisingWhenBuilt", "the policy raised RuntimeError: no licence"),
        ("odd_policies:WithoutMethod", "must have a method rebalance"),
        ("odd_policies:Missing", "'module:Class' that can be imported here"),
        ("no_such_module:Policy", "No module named 'no_such_module'"),
        ("odd_policies:OtherTopology", "slot_to_expert (2, 2) must be (2, 4)"),
        ("odd_policies:Objects", "must be an array of integers"),
    ],
)
def test_a_policy_that_fails_is_reported_in_its_words(processes: list[PolicyProcess], name: str, problem: str) -> None:
    """B13: what a policy raises ends in words, and the process serves on."""
    process = start(processes, name)
    for _ in range(2):
        found = answer(process)
        assert isinstance(found, str) and problem in found


def test_a_process_that_dies_is_started_again(processes: list[PolicyProcess]) -> None:
    process = start(processes, "odd_policies:Dying")
    for _ in range(2):
        assert answer(process) == "the policy's process ended with status 7"


def test_a_policy_that_hangs_is_given_up_and_its_process_ended(processes: list[PolicyProcess]) -> None:
    clock = Clock()
    process = start(processes, "odd_policies:Hanging", clock)
    process.submit(LOAD, START)
    child = process._process
    assert process.poll() is None
    clock.now = 10.1
    assert process.poll() == "the policy did not answer within 10 s"
    assert child is not None and child.poll() is not None
    assert process.poll() is None


def test_a_process_that_cannot_be_started_fails_the_decision_and_not_the_engine(
    processes: list[PolicyProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 15: no process left on the machine is a policy that failed; the next question is asked anew."""
    process = start(processes, "default")

    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        process.submit(LOAD, START)
        problem = process.poll()
    assert isinstance(problem, str) and "cannot be started" in problem and process.poll() is None
    assert isinstance(answer(process), Placement)


def test_what_a_policy_prints_is_not_taken_for_an_answer(processes: list[PolicyProcess]) -> None:
    found = answer(start(processes, "odd_policies:Reversed"))
    assert isinstance(found, Placement)
    assert found.slot_to_expert.tolist() == START.slot_to_expert[:, ::-1].tolist()


def test_the_process_ends_when_its_stdin_does() -> None:
    command = [sys.executable, "-m", "trimtab.experts.control.policy.process"]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_closing_leaves_no_process(processes: list[PolicyProcess]) -> None:
    process = start(processes, "odd_policies:Hanging")
    process.submit(LOAD, START)
    child = process._process
    assert child is not None
    process.close()
    process.close()
    assert child.poll() is not None and not Path(f"/proc/{child.pid}").exists()


def test_neither_the_room_nor_the_process_imports_torch() -> None:
    script = (
        "import sys, pkgutil, importlib, trimtab.experts.control as room\n"
        "for module in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "others = {'torch', 'transformers', 'trimtab.experts.data', 'trimtab.experts.movement'}\n"
        "print(sorted(others & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_in_the_same_thread_a_failing_policy_gives_the_same_words() -> None:
    runner = InlinePolicy(make_policy("odd_policies:Raising", PolicySettings()))
    assert runner.poll() is None
    runner.submit(LOAD, START)
    assert runner.poll() == "the policy raised RuntimeError: no idea" and runner.poll() is None
    runner.close()
