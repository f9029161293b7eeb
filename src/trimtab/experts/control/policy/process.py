"""The policy in a process of its own: no Python of it runs beside a step, and a fault in it harms no request.

`python -m trimtab.experts.control.policy.process` reads length-prefixed msgpack from stdin and answers on stdout; it
ends when stdin closes.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np

from trimtab.experts.control.policy.base import PlacementPolicy, PolicySettings
from trimtab.experts.control.policy.check import InvalidPlanError, check_plan
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology

_LENGTH = struct.Struct("<Q")
_NICENESS = 5  # steps go first where cores are short
_PIPE_CHUNK = 1 << 20


class PolicyRunner(Protocol):
    """Where a policy runs. One question at a time; neither call waits."""

    def submit(self, load: ExpertLoad, current: Placement) -> None: ...

    def poll(self) -> Placement | str | None:
        """The placement that was asked for, checked whole; or why there is none; or None: not yet."""
        ...

    def close(self) -> None: ...


class InlinePolicy:
    """Runs the policy in the calling thread: for tests, the simulator and the planner."""

    def __init__(self, policy: PlacementPolicy) -> None:
        self.policy = policy
        self._answer: Placement | str | None = None

    def submit(self, load: ExpertLoad, current: Placement) -> None:
        try:
            answer = self.policy.rebalance(load, current)
            self._answer = check_plan(answer.slot_to_expert, answer.shares, current, current.digest())
        except Exception as error:  # a policy is anybody's code: whatever it raises is its answer (B13)
            self._answer = describe(error)

    def poll(self) -> Placement | str | None:
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        self._answer = None


class _Array(msgspec.Struct):
    shape: tuple[int, ...]
    dtype: str
    data: bytes


class _Settings(msgspec.Struct):
    policy: str
    num_groups: int
    num_nodes: int
    max_moves_per_layer: int | None
    module_path: list[str]  # where the engine's process finds modules: 'module:Class' is found there too


class _Question(msgspec.Struct):
    number: int
    num_steps: int
    counts: _Array
    topology: tuple[int, int, int]
    slot_to_expert: _Array
    shares: _Array


class _Answer(msgspec.Struct):
    number: int
    problem: str
    slot_to_expert: _Array | None = None
    shares: _Array | None = None


class PolicyProcess:
    """The policy's process, started at the first question and again after it ended. Called on: the engine's thread."""

    def __init__(
        self,
        policy: str,
        settings: PolicySettings,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s = timeout_s
        module_path = [path or os.getcwd() for path in sys.path]
        self._settings = _Settings(
            policy, settings.num_groups, settings.num_nodes, settings.max_moves_per_layer, module_path
        )
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = b""
        self._received = bytearray()
        self._number = 0
        self._asked: tuple[Placement, str, float] | None = None  # the start, its digest, when
        self._problem = ""  # why the last question was not even asked

    def submit(self, load: ExpertLoad, current: Placement) -> None:
        assert self._asked is None, "one question at a time"
        if self._process is None or self._process.poll() is not None:
            try:
                self._start()
            except OSError as error:  # no memory, no process left: a decision fails, and requests go on
                self._problem = f"the policy's process cannot be started: {error}"
                return
        self._number += 1
        self._asked = (current, current.digest(), self._clock())
        topology = current.topology
        question = _Question(
            self._number,
            load.num_steps,
            _pack(load.counts),
            (topology.num_experts, topology.num_redundant, topology.num_ranks),
            _pack(current.slot_to_expert),
            _pack(current.shares),
        )
        self._unsent += _frame(question)
        self._write()

    def poll(self) -> Placement | str | None:
        if self._problem:
            problem, self._problem = self._problem, ""
            return problem
        if self._asked is None:
            return None
        current, digest, asked_at = self._asked
        ended = self._process is None or self._process.poll() is not None  # asked before reading: nothing comes after
        self._write()
        answer = self._read()
        if answer is not None:
            self._asked = None
            return answer.problem or _checked(answer, current, digest)
        if ended:
            status = self._process.returncode if self._process else None
            return self._give_up(f"the policy's process ended with status {status}")
        if self._clock() - asked_at > self.timeout_s:
            return self._give_up(f"the policy did not answer within {self.timeout_s:g} s")
        return None

    def close(self) -> None:
        """Ends the process; safe to call twice."""
        process, self._process = self._process, None
        self._asked, self._problem = None, ""
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            pipe.close()

    def _give_up(self, reason: str) -> str:
        self.close()
        return reason

    def _start(self) -> None:
        self.close()
        self._unsent, self._received = _frame(self._settings), bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trimtab.experts.control.policy.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(self._settings.module_path)},
            start_new_session=True,  # Ctrl-C in a terminal is the engine's to handle
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)

    def _write(self) -> None:
        """As much as the pipe takes now."""
        while self._unsent and self._process is not None:
            assert self._process.stdin is not None
            try:
                written = os.write(self._process.stdin.fileno(), self._unsent[:_PIPE_CHUNK])
            except BlockingIOError:
                return
            except BrokenPipeError:  # it ended: `poll` says so
                return
            self._unsent = self._unsent[written:]

    def _read(self) -> _Answer | None:
        """The answer to the question asked last, once it is here."""
        if self._process is None:
            return None
        assert self._process.stdout is not None
        while True:
            try:
                data = os.read(self._process.stdout.fileno(), _PIPE_CHUNK)
            except BlockingIOError:
                break
            if not data:
                break
            self._received += data
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if len(self._received) < _LENGTH.size + length:
            return None
        answer = msgspec.msgpack.decode(bytes(self._received[_LENGTH.size : _LENGTH.size + length]), type=_Answer)
        del self._received[: _LENGTH.size + length]
        assert answer.number == self._number, "the process answers what it is asked, in order"
        return answer


def describe(error: Exception) -> str:
    return str(error) if isinstance(error, InvalidPlanError) else f"the policy raised {type(error).__name__}: {error}"


def _checked(answer: _Answer, current: Placement, digest: str) -> Placement | str:
    assert answer.slot_to_expert is not None and answer.shares is not None
    try:
        return check_plan(_unpack(answer.slot_to_expert), _unpack(answer.shares), current, digest)
    except InvalidPlanError as error:
        return str(error)


def _pack(array: np.ndarray) -> _Array:
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise InvalidPlanError(f"a placement's map ({type(array).__name__}) must be an array of integers")
    return _Array(array.shape, array.dtype.str, np.ascontiguousarray(array).tobytes())


def _unpack(array: _Array) -> np.ndarray:
    return np.frombuffer(array.data, dtype=np.dtype(array.dtype)).reshape(array.shape)


def _frame(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def _receive(pipe: BinaryIO) -> bytes | None:
    """The next message; None at the end of the pipe."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    data = pipe.read(_LENGTH.unpack(header)[0])
    return data if len(data) == _LENGTH.unpack(header)[0] else None


def _answer(policy: PlacementPolicy | None, problem: str, question: _Question) -> _Answer:
    if policy is None:
        return _Answer(question.number, problem)
    try:
        current = Placement(Topology(*question.topology), _unpack(question.slot_to_expert), _unpack(question.shares))
        placement: Any = policy.rebalance(ExpertLoad(_unpack(question.counts), question.num_steps), current)
        return _Answer(question.number, "", _pack(placement.slot_to_expert), _pack(placement.shares))
    except Exception as error:  # a policy is anybody's code: whatever it raises is its answer (B13)
        return _Answer(question.number, describe(error))


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answers until `source` ends."""
    from trimtab.experts.control.policy.registry import make_policy

    first = _receive(source)
    if first is None:
        return
    settings = msgspec.msgpack.decode(first, type=_Settings)
    policy, problem = None, ""
    try:
        policy = make_policy(
            settings.policy, PolicySettings(settings.num_groups, settings.num_nodes, settings.max_moves_per_layer)
        )
    except Exception as error:  # told with every answer, for nobody asks before
        problem = describe(error)
    while (data := _receive(source)) is not None:
        sink.write(_frame(_answer(policy, problem, msgspec.msgpack.decode(data, type=_Question))))
        sink.flush()


def main() -> None:
    os.nice(_NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a policy prints must not end up among the answers
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
