"""The controller's side of worker processes: started together, watched all the time, ended together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zmq

from trimtab.engine.executor.codec import (
    Failed,
    Heartbeat,
    Loading,
    Output,
    Ready,
    Report,
    Stop,
    WorkerStart,
    decode_report,
    encode,
    encode_start,
)
from trimtab.engine.executor.collector import CAUSE_GRACE_S, StepCollector, WorkerFailedError
from trimtab.engine.executor.worker_loop import LENGTH, commands_address, reports_address
from trimtab.observability.interrupts import hold_interrupts

HEARTBEAT_S = 0.5
_POLL_MS = 200
_START_SILENCE_S = 300.0  # imports from a slow disk hold the heart up; death is noticed at once all the same
_STOP_S = 3.0
_LAST_WORDS_S = 0.3
_MAX_SOCKET_PATH = 100  # Linux allows 107 bytes

_started: weakref.WeakSet[WorkerProcesses] = weakref.WeakSet()


class WorkerProcesses:
    """One process per rank, its stdin held open as its lifeline.

    1. The constructor starts them; `await_ready` waits for all, or raises the reason of the rank that failed.
    2. `send` gives a rank a command; outputs arrive in `collector`. The watching thread ends all workers as soon as
       one dies, fails or falls silent, and leaves the reason in `collector`.
    3. `shutdown` ends them in order, or kills those that do not; safe to call twice, and from any thread.

    All of it is the starting process's: one that is forked from it holds no lifeline, and its end ends nothing.
    """

    def __init__(
        self,
        entry: str,
        setups: Sequence[bytes],
        *,
        environment: Mapping[str, str],
        max_silence_s: float,
        progress: Callable[[str, int, int], None],
        folder: str | None = None,
    ) -> None:
        """`folder`: a `private_folder` where ranks meet for other things too; removed with the workers."""
        self.num_ranks = len(setups)
        self.collector = StepCollector(self.num_ranks)
        self.facts: dict[int, dict[str, int]] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.folder = folder or private_folder()
        self._owner = os.getpid()
        self._max_silence_s = max_silence_s
        self._progress = progress
        self._gave_up: set[int] = set()  # ranks that have said why they end
        self._all_ready = threading.Event()
        self._ending = threading.Event()
        self._end_lock = threading.Lock()
        self._context = zmq.Context()
        self._commands: list[zmq.Socket] = []
        self._reports = self._context.socket(zmq.PULL)
        self._watch_thread = threading.Thread(target=self._watch, name="trimtab-workers", daemon=True)
        _started.add(self)
        try:
            self._reports.bind(reports_address(self.folder))
            for rank in range(self.num_ranks):
                self._commands.append(self._context.socket(zmq.PUSH))
                self._commands[rank].bind(commands_address(self.folder, rank))
            with hold_interrupts():  # a process must not start without being noted
                for _ in setups:
                    self.processes.append(_start(entry, environment))
            self._watch_thread.start()  # first: a process that reads nothing would hold the next lines up for ever
            for rank, setup in enumerate(setups):
                _tell(self.processes[rank], WorkerStart(rank, self.folder, HEARTBEAT_S, setup))
        except BaseException:
            self.shutdown()
            raise

    def await_ready(self) -> None:
        while not self._all_ready.wait(0.1):
            self.collector.check()

    def send(self, rank: int, command: bytes) -> None:
        """Raises the fault of a worker that is known to have failed. A socket whose worker is gone takes no message:
        waiting for it would outlast the news."""
        while True:
            try:
                self._commands[rank].send(command, zmq.NOBLOCK)
                return
            except zmq.Again:
                self.collector.check()
                self._ending.wait(0.01)

    def shutdown(self) -> None:
        if os.getpid() != self._owner:
            return
        with self._end_lock:
            if self._ending.is_set():
                return
            self._ending.set()  # before the first worker ends of it: the watching thread takes that for no fault
            if self._all_ready.is_set() and not self.collector.has_failed:
                self._stop_in_order()
            # The collector of garbage may call this from any thread.
            if self._watch_thread.ident is not None and self._watch_thread is not threading.current_thread():
                self._watch_thread.join()
            self._kill()
            self.drop_lifelines()
            for socket in (*self._commands, self._reports):
                socket.close(linger=0)
            self._context.term()
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- starting and ending -------------------------------------------------------------------------------------------

    def drop_lifelines(self) -> None:
        """Called on: the thread that shuts down; and a process forked from this one, which would keep the workers alive
        when this one is gone."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()

    def _stop_in_order(self) -> None:
        stop = encode(Stop())
        for socket in self._commands:
            with contextlib.suppress(zmq.ZMQError):
                socket.send(stop, zmq.NOBLOCK)
        deadline = time.monotonic() + _STOP_S
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()  # also what is stopped
        for process in self.processes:
            process.wait()

    # -- watching ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Called on: the watching thread."""
        try:
            self._watch_until_the_end()
        except Exception as error:  # a message that is none of ours, or a fault here: nobody would watch any more
            self.collector.fail(error)
        if self.collector.has_failed:
            self._kill()

    def _watch_until_the_end(self) -> None:
        last_heard = [time.monotonic()] * self.num_ranks
        last_awake = last_heard.copy()
        last_look = time.monotonic()
        while not self._ending.is_set():
            self._reports.poll(_POLL_MS)
            for report in self._read():
                last_heard[report.rank] = time.monotonic()
                self._take(report)
            now = time.monotonic()
            if now - last_look > 1.0:  # it was the controller that was held up
                last_heard = [now] * self.num_ranks
                last_awake = [now] * self.num_ranks
            last_look = now
            if self.collector.has_failed or self._find_dead() or self._find_silent(now, last_heard):
                self._hear_the_cause()
                return
            if not self._all_ready.is_set() and self._find_stopped(now, last_awake):
                self._hear_the_cause()
                return

    def _read(self) -> list[Report]:
        reports = []
        with contextlib.suppress(zmq.Again):
            while True:
                reports.append(decode_report(self._reports.recv(zmq.NOBLOCK)))
        return reports

    def _take(self, report: Report) -> None:
        match report:
            case Output(rank, output):
                self.collector.put(rank, output)
            case Ready(rank, facts):
                self.facts[rank] = facts
                if len(self.facts) == self.num_ranks:
                    self._all_ready.set()
            case Loading(rank, stage, done, total):
                if rank == 0:
                    self._progress(stage, done, total)
            case Failed(rank, reason, is_mistake, is_consequence):
                self._gave_up.add(rank)
                is_start = not self._all_ready.is_set()
                self.collector.fail(
                    ValueError(f"rank {rank}: {reason}")
                    if is_mistake and is_start
                    else WorkerFailedError(rank, reason, is_consequence=is_consequence)
                )
            case Heartbeat():
                pass

    def _find_dead(self) -> bool:
        dead = [
            rank
            for rank, process in enumerate(self.processes)
            if process.poll() is not None and rank not in self._gave_up
        ]
        if not dead or self._ending.is_set():
            return False
        deadline = time.monotonic() + _LAST_WORDS_S  # it may have said why, and others may have died of it
        while not self.collector.has_failed and (left_s := deadline - time.monotonic()) > 0:
            self._reports.poll(int(left_s * 1000) + 1)
            for report in self._read():
                self._take(report)
        for rank in set(dead) - self._gave_up:
            process = self.processes[rank]
            self.collector.fail(WorkerFailedError(rank, f"its process ({process.pid}) {_how_it_ended(process)}"))
        return True

    def _hear_the_cause(self) -> None:
        """Ranks that gave up because of another one may be heard first: that one gets time to say why, or to be seen
        dead, before all are ended."""
        deadline = time.monotonic() + CAUSE_GRACE_S
        while not self.collector.knows_cause and time.monotonic() < deadline:
            self._reports.poll(20)
            for report in self._read():
                self._take(report)
            self._find_dead()

    def _find_silent(self, now: float, last_heard: list[float]) -> bool:
        allowed_s = self._max_silence_s if self._all_ready.is_set() else _START_SILENCE_S
        silent = [rank for rank, heard in enumerate(last_heard) if now - heard > allowed_s]
        for rank in silent:
            pid = self.processes[rank].pid
            self.collector.fail(
                WorkerFailedError(rank, f"its process ({pid}) has sent no heartbeat for {now - last_heard[rank]:.1f} s")
            )
        return bool(silent)

    def _find_stopped(self, now: float, last_awake: list[float]) -> bool:
        """While workers start, silence may be work; whether a process is stopped is known to the system."""
        for rank, process in enumerate(self.processes):
            if not _is_stopped(process):
                last_awake[rank] = now
        stopped = [rank for rank, awake in enumerate(last_awake) if now - awake > self._max_silence_s]
        for rank in stopped:
            reason = f"its process ({self.processes[rank].pid}) was stopped for {now - last_awake[rank]:.1f} s"
            self.collector.fail(WorkerFailedError(rank, f"{reason} while it started"))
        return bool(stopped)


def _drop_all_lifelines() -> None:
    for workers in list(_started):
        workers.drop_lifelines()


os.register_at_fork(after_in_child=_drop_all_lifelines)


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    try:
        # WNOWAIT: asked again, it answers again, for as long as the process is stopped.
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # ended, and that is seen elsewhere
        return False


def _start(entry: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    home = str(Path(__file__).parents[3])  # of the package, wherever this process found it
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if home not in sysconfig.get_paths().values():  # in front of the standard library, site-packages would hide it
        paths.insert(0, home)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", entry],
        stdin=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        process_group=0,  # a terminal's Ctrl-C is for the controller alone
    )


def _tell(process: subprocess.Popen[bytes], start: WorkerStart) -> None:
    content = encode_start(start)
    left = memoryview(LENGTH.pack(len(content)) + content)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died: the watching thread will say how
        while left:
            left = left[process.stdin.write(left) :]


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def private_folder() -> str:
    """A new folder for sockets, that only this user can enter."""
    folder = tempfile.mkdtemp(prefix="trimtab-")
    if len(folder) + len("/rank-9999") > _MAX_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="trimtab-", dir="/tmp")
    return folder
