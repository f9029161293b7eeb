"""Workers that are killed, stopped or stuck, and controllers that go away: requests end, and nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from trimtab.engine.config import SchedulerConfig
from trimtab.engine.engine import Engine, EngineDeadError
from trimtab.engine.executor import worker_processes
from trimtab.engine.executor.codec import encode_setup
from trimtab.engine.executor.multiprocess import MultiprocessExecutor
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scheduling import make_kv_cache
from trimtab.testing.scripted_worker import make_setup
from trimtab.testing.sockets import listening_addresses

WORKER = "trimtab.testing.scripted_worker"
DEADLINE_S = 5.0


def start(num_ranks: int = 3, faults: dict[int, dict[str, Any]] | None = None, **options: float) -> Engine:
    setups = [make_setup(**(faults or {}).get(rank, {})) for rank in range(num_ranks)]
    executor = MultiprocessExecutor(WORKER, setups, **options)  # type: ignore[arg-type]
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, async_depth=1)
    return Engine(executor, make_kv_cache(), limits, vocab_size=97, data_parallel_size=num_ranks)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = start()
    yield engine
    engine.shutdown()


def workers_of(engine: Engine) -> Any:
    assert isinstance(engine.executor, MultiprocessExecutor)
    return engine.executor.workers


def expect_nothing_left(pids: list[int], folder: str) -> None:
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not Path(folder).exists()


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


CAUSES = {
    "SIGKILL": "ended by SIGKILL",
    "SIGSTOP": "sent no heartbeat",
    "SIGTERM": "told to end by SIGTERM",
    "SIGSEGV": "ended by SIGSEGV",
}


@pytest.mark.parametrize(
    ("signal_name", "victim"), [("SIGKILL", 0), ("SIGKILL", 2), ("SIGSTOP", 0), ("SIGTERM", 2), ("SIGSEGV", 1)]
)
def test_killed_or_stopped_worker_fails_every_request_within_five_seconds(signal_name: str, victim: int) -> None:
    """B123: requests end with an error that names the rank, new ones are refused, no process or folder is left."""
    engine = start()
    workers = workers_of(engine)
    pids, folder = [process.pid for process in workers.processes], workers.folder
    for index in range(5):
        engine.add_request(str(index), [1, 2, index], SamplingParams(max_tokens=60, detokenize=False))
    engine.step()
    os.kill(pids[victim], getattr(signal, signal_name))
    began = time.monotonic()
    outputs = []
    while engine.has_unfinished:
        outputs += [output for output in engine.step() if output.finished]
    assert time.monotonic() - began < DEADLINE_S
    cause = CAUSES[signal_name]
    assert len(outputs) == 5
    for output in outputs:
        assert output.error is not None and f"rank {victim}: its process ({pids[victim]}) " in output.error
        assert cause in output.error and output.outputs[0].finish_reason == "error"
    with pytest.raises(EngineDeadError, match=rf"rank {victim}: .*{cause}"):
        engine.add_request("late", [1])
    engine.shutdown()
    expect_nothing_left(pids, folder)


def test_death_of_a_worker_is_noticed_while_nothing_runs(engine: Engine) -> None:
    """B123: health turns bad without a request."""
    engine.check_health()
    workers = workers_of(engine)
    os.kill(workers.processes[1].pid, signal.SIGKILL)

    def is_dead() -> bool:
        try:
            engine.check_health()
        except EngineDeadError as error:
            assert "rank 1" in str(error)
            return True
        return False

    assert wait_until(is_dead, DEADLINE_S)
    assert wait_until(lambda: all(process.poll() is not None for process in workers.processes), DEADLINE_S)


@pytest.mark.parametrize("end", ["SIGTERM", "raise_at_step", "Stop"])
def test_a_rank_that_ends_between_exchanges_tells_those_that_wait_for_it(tmp_path: Path, end: str) -> None:
    """B123: by a signal or by a fault in a layer without an exchange. An orderly end is none of that."""
    faults = {"raise_at_step": 1} if end == "raise_at_step" else {}
    engine = start(2, {1: {"abort_file": str(tmp_path / "aborted"), **faults}})
    workers = workers_of(engine)
    engine.add_request("r", [1, 2], SamplingParams(max_tokens=9, detokenize=False))
    engine.step()
    if end == "SIGTERM":
        os.kill(workers.processes[1].pid, signal.SIGTERM)
    if end != "Stop":
        while engine.has_unfinished:
            engine.step()
    engine.shutdown()
    assert (tmp_path / "aborted").exists() == (end != "Stop")


def test_worker_that_hangs_in_a_step_is_found_by_the_steps_deadline() -> None:
    """Its heart beats on: only the missing progress shows."""
    engine = start(2, {1: {"hang_at_step": 1}}, max_step_s=0.5)
    workers = workers_of(engine)
    pids = [process.pid for process in workers.processes]
    engine.add_request("r", [1, 2], SamplingParams(max_tokens=9, detokenize=False))
    outputs = [engine.step(), engine.step()][1]
    assert outputs[0].error is not None and "rank 1: did not answer step 1 within 0.5 s" in outputs[0].error
    expect_nothing_left(pids, workers.folder)


def test_worker_that_dies_before_it_is_ready_ends_the_start_with_its_exit_code() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1: its process \(\d+\) ended with exit code 4"):
        start(2, {1: {"die_at_start": True}})


def test_module_that_cannot_be_run_ends_the_start() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0: its process \(\d+\) ended with exit code 1"):
        MultiprocessExecutor("trimtab.testing.no_such_worker", [make_setup()])


def test_collected_executor_ends_its_workers() -> None:
    engine = start(2)
    workers = workers_of(engine)
    pids, folder = [process.pid for process in workers.processes], workers.folder
    del engine
    gc.collect()
    expect_nothing_left(pids, folder)


CONTROLLER = f"""
import os, signal, sys
from trimtab.engine.executor.multiprocess import MultiprocessExecutor
from trimtab.testing.scripted_worker import make_setup
executor = MultiprocessExecutor({WORKER!r}, [make_setup(), make_setup()])
print(executor.workers.folder, *(process.pid for process in executor.workers.processes), flush=True)
if sys.argv[1] == "exit":
    sys.exit(0)
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""


@pytest.mark.parametrize("end", ["exit", "SIGINT", "SIGTERM", "SIGKILL"])
def test_workers_end_with_their_controller_however_it_ends(end: str) -> None:
    run = subprocess.run([sys.executable, "-c", CONTROLLER, end], stdout=subprocess.PIPE, text=True, timeout=60)
    assert run.returncode == (0 if end == "exit" else -getattr(signal, end))
    folder, *pids = run.stdout.split()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), DEADLINE_S)
    assert not Path(folder).exists()


def test_nothing_listens_beyond_sockets_in_a_private_folder(engine: Engine) -> None:
    workers = workers_of(engine)
    pids = [os.getpid(), *(process.pid for process in workers.processes)]
    with socket.socket() as seen:
        seen.bind(("127.0.0.1", 0))
        seen.listen()
        assert listening_addresses(pids) == ["127.0.0.1"], "the test sees what listens"
    assert listening_addresses(pids) == []
    assert Path(workers.folder).stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as probe:  # the folder is what keeps others out
        probe.connect(f"{workers.folder}/reports")


def test_plan_for_a_worker_that_just_died_does_not_block(engine: Engine) -> None:
    """Its socket takes no more messages; the fault ends the wait."""
    workers = workers_of(engine)
    os.kill(workers.processes[0].pid, signal.SIGKILL)
    workers.processes[0].wait()
    with pytest.raises(RuntimeError, match=r"rank 0: .*SIGKILL"):
        for _ in range(10**6):
            workers.send(0, b"")


def test_message_that_is_no_report_ends_the_engine_with_a_reason(engine: Engine) -> None:
    workers = workers_of(engine)
    intruder = zmq.Context.instance().socket(zmq.PUSH)
    intruder.connect(f"ipc://{workers.folder}/reports")
    intruder.send(b"\x81\xa4type\xa5Other")
    assert wait_until(lambda: workers.collector.has_failed, DEADLINE_S)
    with pytest.raises(EngineDeadError, match="ValidationError"):
        engine.check_health()
    intruder.close(linger=0)


@pytest.mark.parametrize("setup_bytes", [1, 2**20])
def test_worker_that_is_stopped_while_it_starts_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, setup_bytes: int
) -> None:
    """Its silence may be work, so the system is asked; also where its setup is longer than what a pipe takes."""
    start_process, started = worker_processes._start, []

    def start_and_stop_the_second(*args: Any) -> Any:
        started.append(start_process(*args))
        if len(started) == 2:
            os.kill(started[1].pid, signal.SIGSTOP)
        return started[-1]

    monkeypatch.setattr(worker_processes, "_start", start_and_stop_the_second)
    with private_temporary_folder(monkeypatch) as scratch:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"^rank 1: its process \(\d+\) was stopped for .* s while it started"):
            MultiprocessExecutor(WORKER, [encode_setup({"padding": "-" * setup_bytes})] * 3)
        assert time.monotonic() - began < DEADLINE_S
        assert not list(scratch.iterdir())
    assert not [process.pid for process in started if Path(f"/proc/{process.pid}").exists()]


@contextmanager
def private_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tt", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_worker_that_is_lost_at_shutdown_holds_it_up_for_less_than_five_seconds(signal_name: str) -> None:
    engine = start(2)
    workers = workers_of(engine)
    pids, folder = [process.pid for process in workers.processes], workers.folder
    os.kill(pids[1], getattr(signal, signal_name))
    began = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - began < DEADLINE_S
    expect_nothing_left(pids, folder)


def test_fork_of_the_controller_ends_nothing_and_keeps_nothing_alive() -> None:
    """A data loader or a `multiprocessing` pool in a program with an engine: its children share all descriptors."""
    run = subprocess.Popen([sys.executable, "-c", FORKING_CONTROLLER], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    forked, folder, *pids = run.stdout.readline().split()
    try:
        assert run.stdout.readline() == "healthy after the end of a fork\n"
        run.kill()
        run.wait()
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), DEADLINE_S)
        assert not Path(folder).exists()
        assert Path(f"/proc/{forked}").exists(), "or it was its end that closed the workers' lifelines"
    finally:
        os.kill(int(forked), signal.SIGKILL)
        run.stdout.close()


FORKING_CONTROLLER = f"""
import os, signal, sys
from pathlib import Path
from trimtab.engine.executor.multiprocess import MultiprocessExecutor
from trimtab.plan import StepPlan
from trimtab.testing.scripted_worker import make_setup
executor = MultiprocessExecutor({WORKER!r}, [make_setup(), make_setup()])
if not (forked := os.fork()):
    signal.pause()
print(forked, executor.workers.folder, *(process.pid for process in executor.workers.processes), flush=True)
if not (ending := os.fork()):
    sys.exit(0)
os.waitpid(ending, 0)
executor.execute([StepPlan(0, runs_forward=True)] * 2).get()
if Path(executor.workers.folder).exists():
    print("healthy after the end of a fork", flush=True)
signal.pause()
"""


def test_engines_one_after_the_other_leave_no_descriptor_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with private_temporary_folder(monkeypatch) as scratch:
        start(1).shutdown()
        before = held()
        for _ in range(5):
            engine = start(1)
            engine.add_request("r", [1, 2], SamplingParams(max_tokens=3, detokenize=False))
            while engine.has_unfinished:
                engine.step()
            assert held() > before, "the test sees what an engine holds"
            engine.shutdown()
        with pytest.raises(RuntimeError, match="exit code 4"):
            start(2, {1: {"die_at_start": True}})
        assert wait_until(lambda: held() == before, DEADLINE_S), (held(), before)
        assert not list(scratch.iterdir())


@pytest.mark.parametrize("folder", ["/nowhere", "/proc", "long", "a b@é%"])
def test_any_folder_for_temporary_files_will_do(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """One that is missing, read-only, longer than a socket's path may be, or named in a person's own way."""
    with private_temporary_folder(monkeypatch) as scratch:
        chosen = Path(folder) if folder.startswith("/") else scratch / (folder * (40 if folder == "long" else 1))
        if not folder.startswith("/"):
            chosen.mkdir()
        monkeypatch.setenv("TMPDIR", str(chosen))
        monkeypatch.setattr(tempfile, "tempdir", None)
        engine = start(1)
        assert Path(workers_of(engine).folder).stat().st_mode & 0o777 == 0o700
        engine.shutdown()
        assert folder.startswith("/") or not list(chosen.iterdir())
