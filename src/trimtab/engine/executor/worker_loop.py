"""The life of a worker process: start, one step after the other, end. What it computes with is handed to `serve`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import zmq

from trimtab.distributed.errors import RankFailureError
from trimtab.engine.executor.codec import (
    Failed,
    Heartbeat,
    Loading,
    Output,
    Ready,
    Stop,
    WorkerStart,
    decode_command,
    decode_start,
    encode,
)
from trimtab.engine.executor.worker import Worker

LENGTH = struct.Struct("<Q")
_STDIN = 0
_LINGER_MS = 2000  # for the last words of a worker to leave it
_EXIT_TERMINATED = 128 + signal.SIGTERM


def commands_address(folder: str, rank: int) -> str:
    return f"ipc://{folder}/rank-{rank}"


def reports_address(folder: str) -> str:
    return f"ipc://{folder}/reports"


class _TerminatedError(BaseException):
    """SIGTERM came: raised where the main thread is, so that this rank leaves no other one waiting."""


# Rank, setup, and where to say how far loading is (stage, done, total).
Build = Callable[[int, bytes, Callable[[str, int, int], None]], Worker]


def serve(build: Build) -> int:
    """Runs this process as one rank's worker and returns its exit code.

    1. The controller writes a `WorkerStart` to stdin and keeps the pipe open: its end is the controller's end.
    2. `build` makes the runner; `Ready`, or `Failed` with the reason, goes to the controller.
    3. Each `Step` is answered by an `Output`, until `Stop`. A step that raises, or SIGTERM, is answered by `Failed` and
       ends all.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to answer
    start = decode_start(_read_stdin(*LENGTH.unpack(_read_stdin(LENGTH.size))))
    threading.Thread(target=_end_with_controller, args=(start.folder,), daemon=True).start()
    context = zmq.Context()
    reports = context.socket(zmq.PUSH)
    reports.setsockopt(zmq.LINGER, _LINGER_MS)
    reports.connect(reports_address(start.folder))
    stopped = threading.Event()
    heart = threading.Thread(target=_beat, args=(context, start, stopped), daemon=True)
    heart.start()
    try:
        signal.signal(signal.SIGTERM, _on_terminate)
        _work(build, start, context, reports)
        return 0
    except _TerminatedError:
        reason = f"its process ({os.getpid()}) was told to end by SIGTERM"
        reports.send(encode(Failed(start.rank, reason, is_mistake=False, is_consequence=False)))
        return _EXIT_TERMINATED
    except BaseException as error:
        traceback.print_exc()
        failed = Failed(
            start.rank,
            str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}",
            is_mistake=isinstance(error, ValueError),
            is_consequence=isinstance(error, RankFailureError),
        )
        reports.send(encode(failed))
        return 1
    finally:
        stopped.set()
        heart.join()
        reports.close()
        context.term()


def _work(build: Build, start: WorkerStart, context: zmq.Context, reports: zmq.Socket) -> None:
    rank = start.rank
    worker = build(
        rank,
        start.setup,
        lambda stage, done, total: reports.send(encode(Loading(rank, stage, done, total))),
    )
    commands = context.socket(zmq.PULL)
    try:
        commands.connect(commands_address(start.folder, rank))
        reports.send(encode(Ready(rank, worker.facts)))
        while not isinstance(command := decode_command(commands.recv()), Stop):
            worker.runner.execute(command.plan)
            reports.send(encode(Output(rank, worker.runner.sample().get())))
    except BaseException:
        worker.abort()
        raise
    finally:
        commands.close(linger=0)
        worker.close()


def _on_terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the end must not be cut short
    raise _TerminatedError


def _beat(context: zmq.Context, start: WorkerStart, stopped: threading.Event) -> None:
    """Heartbeats on a socket and thread of their own: a long step does not hold them up, a stopped process does."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(reports_address(start.folder))
    beat = encode(Heartbeat(start.rank))
    while not stopped.wait(start.heartbeat_s):
        # A controller that is held up reads no beats; its queue may be full, and then it has enough of them.
        with contextlib.suppress(zmq.Again):
            socket.send(beat, zmq.NOBLOCK)
    socket.close()


def _read_stdin(num_bytes: int) -> bytes:
    """Past `sys.stdin`, whose lock a thread that waits in it would hold at the interpreter's end."""
    content = b""
    while len(content) < num_bytes:
        if not (part := os.read(_STDIN, num_bytes - len(content))):
            raise EOFError(f"the controller went away after {len(content)} of {num_bytes} bytes")
        content += part
    return content


def _end_with_controller(folder: str) -> None:
    """Ends this process with the controller, however that ended, and removes what it could not remove any more."""
    while os.read(_STDIN, 1):
        pass
    if Path(folder).exists():  # after an orderly end the controller has removed it, or will
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
