"""Experts spread over ranks give the tokens of one process, whoever is busy or idle and wherever replicas are."""

import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab import LLM, SamplingParams
from trimtab.engine.engine import EngineDeadError
from trimtab.engine.executor.codec import Loading
from trimtab.engine.executor.multiprocess import MultiprocessExecutor
from trimtab.engine.executor.worker_processes import WorkerProcesses
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.placement_file import write_placement
from trimtab.models.checkpoint import Checkpoint
from trimtab.models.spec import read_spec
from trimtab.testing.checkpoints import make_tiny_checkpoint
from trimtab.testing.sockets import listening_addresses

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 16,
    "kv_cache_memory_bytes": "2MiB",
    "num_threads": 1,
}
LAYOUTS = {
    "DP 2": {"data_parallel_size": 2},
    "DP 4": {"data_parallel_size": 4},
    "TP 2": {"tensor_parallel_size": 2},
    "TP 4": {"tensor_parallel_size": 4},
    "DP 2 x TP 2": {"data_parallel_size": 2, "tensor_parallel_size": 2},
}
# Ranks that share 8 experts unevenly but for some replicas, and one that leaves a single slot to each.
ODD_LAYOUTS = {
    "DP 3": {"data_parallel_size": 3, "num_redundant_experts": 1},
    "TP 5": {"tensor_parallel_size": 5, "num_redundant_experts": 2},
    "DP 4 x TP 3": {"data_parallel_size": 4, "tensor_parallel_size": 3, "num_redundant_experts": 4},
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), family=request.param, seed=3)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("mixtral"), seed=3)


def open_llm(path: Path, backend: str = "threads", **options) -> LLM:
    ranked = {"enable_expert_parallel": True, "distributed_executor_backend": backend}
    return LLM(str(path), **{**OPTIONS, **ranked, **options})


def random_prompts(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    print(f"seed {seed}")
    rng = random.Random(seed)
    return [[rng.randrange(100) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[list[int]]:
    """The single process's tokens; those of transformers by tests/journeys/test_generate.py."""
    with LLM(str(checkpoint), **OPTIONS) as llm:
        tokens = tokens_of(llm, random_prompts(21, 9))
    assert len({tuple(answer) for answer in tokens}) > 5, "the oracle's answers differ, or the test sees nothing"
    return tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_one_process(checkpoint, expected, layout) -> None:
    with open_llm(checkpoint, **LAYOUTS[layout]) as llm:
        assert tokens_of(llm, random_prompts(21, 9)) == expected
        assert len(llm.stats()["ranks"]) == LAYOUTS[layout].get("data_parallel_size", 1)


@pytest.mark.parametrize("layout", ODD_LAYOUTS)
def test_any_number_of_ranks_serves_prompts_of_any_length(mixtral, tmp_path, layout) -> None:
    """More ranks than cores, than requests and than tokens; prompts of one token and of all that the model takes."""
    options = ODD_LAYOUTS[layout]
    num_redundant = options["num_redundant_experts"]
    num_ranks = options.get("data_parallel_size", 1) * options.get("tensor_parallel_size", 1)
    rng = random.Random(4)
    rows = [rng.sample([*range(8), *rng.sample(range(8), num_redundant)], 8 + num_redundant) for _ in range(2)]
    write_placement(Placement(Topology(8, num_redundant, num_ranks), rows), tmp_path / "placement.json")
    prompts = [rng.choices(range(100), k=length) for length in (1, 1, 63, 62, 17, 16, 15)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=2)

    def answers(llm: LLM) -> list:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [(output.error, output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    with LLM(str(mixtral), **OPTIONS) as llm:
        expected = answers(llm)
    with open_llm(mixtral, initial_placement=str(tmp_path / "placement.json"), **options) as llm:
        assert answers(llm) == expected


@pytest.mark.parametrize("layout", ["DP 2", "DP 2 x TP 2"])
def test_requests_that_come_and_go_at_random_get_their_tokens(checkpoint, layout) -> None:
    """Ranks are busy and idle in any mix; some requests are aborted; sampled and greedy ones share batches."""
    rng = random.Random(5)
    prompts = random_prompts(6, 14, longest=20)
    params = [
        SamplingParams(temperature=rng.choice([0, 1]), seed=index, max_tokens=rng.randint(1, 12), ignore_eos=True,
                       detokenize=False) for index in range(14)
    ]  # fmt: skip
    with LLM(str(checkpoint), **OPTIONS) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        solo = [output.outputs[0].token_ids for output in outputs]
    aborted = set(rng.sample(range(14), 4))
    with open_llm(checkpoint, async_depth=2, **LAYOUTS[layout]) as llm:
        engine, finished, waiting = llm.engine, {}, list(range(14))
        while waiting or engine.has_unfinished:
            if waiting and rng.random() < 0.4:
                index = waiting.pop(0)
                engine.add_request(str(index), prompts[index], params[index], data_parallel_rank=rng.choice([None, 1]))
            for output in engine.step():
                finished[int(output.request_id)] = output
            for index in aborted - finished.keys():
                if rng.random() < 0.2 and (output := engine.abort(str(index))) is not None:
                    finished[index] = output
    for index, output in finished.items():
        (completion,) = output.outputs
        if completion.finish_reason == "abort":
            assert completion.token_ids == solo[index][: len(completion.token_ids)]
        else:
            assert completion.token_ids == solo[index]
    assert len(finished) == 14


def test_idle_ranks_serve_their_experts_and_count_no_load(mixtral) -> None:
    """B04: one request of 64 tokens on each rank in turn, the other three idle (B05)."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    with LLM(str(mixtral), **OPTIONS) as llm, llm.expert_usage() as usage:
        (solo,) = tokens_of(llm, [[5, 6, 7]], params)
    with open_llm(mixtral, data_parallel_size=4) as llm:
        for rank in range(4):
            with llm.expert_usage() as ranked_usage:
                llm.engine.add_request(str(rank), [5, 6, 7], params, data_parallel_rank=rank)
                outputs = []
                while llm.engine.has_unfinished:
                    outputs = llm.engine.step()
            assert outputs[0].outputs[0].token_ids == solo
            assert ranked_usage.counts.tolist() == usage.counts.tolist()


@pytest.mark.parametrize("layout", ["DP 2", "TP 2", "DP 2 x TP 2"])
def test_replicas_where_a_file_puts_them_change_no_token(checkpoint, expected, tmp_path, layout) -> None:
    """B22: experts shuffled over the ranks, some of them held two or three times, with unequal shares."""
    num_ranks = 4 if layout == "DP 2 x TP 2" else 2
    num_layers = len(read_spec(checkpoint).moe_layers)
    rng = random.Random(8)
    rows = [rng.sample([*range(8), *rng.choices(range(8), k=4)], 12) for _ in range(num_layers)]
    placement = Placement(Topology(8, 4, num_ranks), rows, [rng.choices((1, 2, 5), k=12) for _ in rows])
    write_placement(placement, tmp_path / "placement.json")
    options = {"num_redundant_experts": 4, "initial_placement": str(tmp_path / "placement.json")}
    with open_llm(checkpoint, **options, **LAYOUTS[layout]) as llm:
        assert tokens_of(llm, random_prompts(21, 9)) == expected
        held = [layer.routing_table.slots.unique().numel() for layer in llm._parts.models[0].moe_layers]
        assert held == [12] * num_layers, "every slot has its part of the tokens"


def test_placement_that_does_not_fit_the_ranks_is_refused_before_weights_are_read(mixtral, tmp_path) -> None:
    """B38: written for two ranks, given to four."""
    write_placement(Placement.identity(Topology(8, 0, 2), 2), tmp_path / "placement.json")
    options = {"initial_placement": str(tmp_path / "placement.json")}
    with pytest.raises(ValueError, match=r"initial_placement .*layer 0 \(2 ranks\) must list the slots of 4 ranks"):
        open_llm(mixtral, data_parallel_size=4, **options)
    with open_llm(mixtral, data_parallel_size=2, **options) as llm:
        assert tokens_of(llm, [[1, 2, 3]])


def stored_bytes(checkpoint: Path) -> tuple[int, int]:
    """Of the dense part and of the 8 experts of all layers, by what the files' headers state."""
    tensors = Checkpoint.open(checkpoint).tensors
    experts = {name: entry for name, entry in tensors.items() if ".experts." in name}
    expert_bytes = sum(entry.end - entry.start for entry in experts.values())
    return sum(entry.end - entry.start for entry in tensors.values()) - expert_bytes, expert_bytes


@pytest.mark.parametrize("layout", ["one rank", *LAYOUTS])
def test_each_rank_reads_its_share_and_no_more(checkpoint, layout) -> None:
    """Bytes by the loader's meter."""
    dense_bytes, expert_bytes = stored_bytes(checkpoint)
    with open_llm(checkpoint, **LAYOUTS.get(layout, {})) as llm:
        read = [worker["bytes_read"] for worker in llm.stats()["workers"]]
    num_ranks = math.prod(LAYOUTS.get(layout, {}).values())
    assert read == [dense_bytes + expert_bytes // num_ranks] * num_ranks


def test_rank_reads_the_experts_of_its_slots_and_no_others(checkpoint, tmp_path) -> None:
    """The bytes of its 3 slots, also where two of them hold one expert; none of what it holds no slot of."""
    num_layers = len(read_spec(checkpoint).moe_layers)
    dense_bytes, expert_bytes = stored_bytes(checkpoint)
    rows = [[0, 1, 0, 2, 3, 4, 5, 6, 7, 0, 1, 2]] * num_layers
    write_placement(Placement(Topology(8, 4, 4), rows), tmp_path / "placement.json")
    options = {"num_redundant_experts": 4, "initial_placement": str(tmp_path / "placement.json")}
    with open_llm(checkpoint, data_parallel_size=2, tensor_parallel_size=2, **options) as llm:
        experts_read = [(worker["bytes_read"] - dense_bytes) / expert_bytes * 8 for worker in llm.stats()["workers"]]
    assert experts_read == [3, 3, 3, 3]


@pytest.mark.parametrize(("all2all_backend", "async_depth"), [("shared_memory", 2), ("gloo", 1)])
def test_ranks_as_processes_give_the_tokens_of_one(mixtral, all2all_backend, async_depth) -> None:
    prompts = random_prompts(22, 7)
    with LLM(str(mixtral), **OPTIONS) as llm:
        expected = tokens_of(llm, prompts)
    options = {"data_parallel_size": 2, "all2all_backend": all2all_backend, "async_depth": async_depth}
    with open_llm(mixtral, "mp", **options) as llm:
        assert tokens_of(llm, prompts) == expected
        assert {worker["num_threads"] for worker in llm.stats()["workers"]} == {1}
        assert set(listening_addresses(children_of(os.getpid()))) == (
            {"127.0.0.1"} if all2all_backend == "gloo" else set()
        )
        with pytest.raises(ValueError, match=r"expert_usage counts in this process.*'mp'.*use 'threads'"):
            llm.expert_usage().__enter__()
        expect_that_ctrl_c_ends_a_step_in_which_a_worker_is_stopped(llm)


def expect_that_ctrl_c_ends_a_step_in_which_a_worker_is_stopped(llm: LLM) -> None:
    """B123: the other rank waits for it in native code, and the caller for both."""
    assert isinstance(llm.engine.executor, MultiprocessExecutor)
    workers = llm.engine.executor.workers
    params = SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False)
    for index in range(3):
        llm.engine.add_request(f"long {index}", [1, 2, index], params)
    llm.engine.step()
    os.kill(workers.processes[1].pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    assert time.monotonic() - began < 5
    with pytest.raises(EngineDeadError, match=r"rank 1: its process .* has sent no heartbeat"):
        llm.engine.check_health()
    llm.shutdown()
    expect_no_worker_left(workers)


@pytest.mark.parametrize(("all2all_backend", "signal_name"), [("shared_memory", "SIGKILL"), ("gloo", "SIGSTOP")])
def test_requests_end_within_five_seconds_of_the_loss_of_a_rank(mixtral, all2all_backend, signal_name) -> None:
    """B123: some are prefilling, some decode; the other rank is in the exchange or on its way there."""
    with open_llm(mixtral, "mp", data_parallel_size=2, all2all_backend=all2all_backend, async_depth=2) as llm:
        workers = llm.engine.executor.workers
        params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
        for index, prompt in enumerate(([1], [2] * 5, [3] * 24, [4] * 24, [5] * 24, [6] * 24)):
            llm.engine.add_request(str(index), prompt, params)
        llm.engine.step()
        os.kill(workers.processes[1].pid, getattr(signal, signal_name))
        began = time.monotonic()
        outputs = []
        while llm.engine.has_unfinished:
            outputs += [output for output in llm.engine.step() if output.finished]
        assert time.monotonic() - began < 5
        assert len(outputs) == 6 and all("rank 1: its process " in str(output.error) for output in outputs)
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.engine.check_health()
    expect_no_worker_left(workers)


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_rank_lost_while_it_loads_ends_the_start_within_five_seconds(mixtral, monkeypatch, signal_name) -> None:
    """B123: the other ranks load on or wait for it."""
    lost: list[tuple[WorkerProcesses, float]] = []

    class Workers(WorkerProcesses):
        def _take(self, report) -> None:
            if isinstance(report, Loading) and not lost:
                lost.append((self, time.monotonic()))
                os.kill(self.processes[1].pid, getattr(signal, signal_name))
            super()._take(report)

    monkeypatch.setattr("trimtab.engine.executor.multiprocess.WorkerProcesses", Workers)
    cause = {"SIGKILL": "ended by SIGKILL", "SIGSTOP": "(sent no heartbeat|was stopped) for"}[signal_name]
    with pytest.raises(RuntimeError, match=rf"rank 1: its process .*{cause}"):
        open_llm(mixtral, "mp", data_parallel_size=2)
    ((workers, when),) = lost
    assert time.monotonic() - when < 5
    expect_no_worker_left(workers)


def expect_no_worker_left(workers: WorkerProcesses) -> None:
    assert not any(Path(f"/proc/{process.pid}").exists() for process in workers.processes)
    assert not Path(workers.folder).exists()


def test_rank_that_fails_in_a_step_releases_those_that_wait_for_it(mixtral) -> None:
    """The others are in the exchange, in native code; the error names the rank that failed and not those."""
    with open_llm(mixtral, data_parallel_size=4) as llm:
        llm.engine.add_request("r", [1, 2, 3], GREEDY, data_parallel_rank=0)
        llm.engine.step()

        def fail() -> None:
            raise RuntimeError("no more memory")

        llm._parts.models[2].forward_idle = fail  # type: ignore[method-assign]
        (output,) = llm.engine.step()
        assert output.error is not None and "rank 2: RuntimeError: no more memory" in output.error
        with pytest.raises(EngineDeadError, match="rank 2"):
            llm.engine.check_health()


class Log:
    def __init__(self) -> None:
        self.operations: list[tuple[str, tuple[int, ...]]] = []

    def record(self, operation: str, sizes: tuple[int, ...]) -> None:
        self.operations.append((operation, sizes))


@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
def test_collectives_of_all_ranks_are_the_same_over_200_random_steps(mixtral, backend) -> None:
    """B06: in number, order and the sizes that ranks must agree on."""
    rng = random.Random(9)
    with open_llm(mixtral, data_parallel_size=2, all2all_backend=backend) as llm:
        logs = [Log() for _ in llm._parts.models]
        for model, log in zip(llm._parts.models, logs, strict=True):
            model.moe_layers[0].dispatcher.log = log  # one dispatcher serves all layers of a rank
        for step in range(200):
            if rng.random() < 0.2 or not llm.engine.has_unfinished:
                params = SamplingParams(max_tokens=rng.randint(1, 9), detokenize=False)
                prompt = random.Random(step).choices(range(100), k=rng.randint(1, 20))
                llm.engine.add_request(str(step), prompt, params, data_parallel_rank=rng.choice([None, 0, 1]))
            llm.engine.step()
        assert set(listening_addresses([os.getpid()])) <= {"127.0.0.1"}, "Gloo stays on the loopback device"
    assert len(logs[0].operations) >= 200 * 2
    assert all(log.operations == logs[0].operations for log in logs)


def test_collected_llm_ends_its_ranks(mixtral) -> None:
    llm = open_llm(mixtral, data_parallel_size=2)
    assert sum(thread.name.startswith("trimtab-rank-") for thread in threading.enumerate()) == 2
    del llm
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trimtab-rank-")]


def test_ranks_in_threads_keep_their_folder_when_a_fork_ends_and_leave_none(mixtral, monkeypatch, short_folder) -> None:
    """Experts that move by Gloo meet there each time anew."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    with open_llm(mixtral, data_parallel_size=2) as llm:
        assert len(list(short_folder.iterdir())) == 1
        if not (forked := os.fork()):
            try:
                llm.engine.executor.shutdown()  # as an orderly end of this process does
            finally:
                os._exit(0)
        os.waitpid(forked, 0)
        assert len(list(short_folder.iterdir())) == 1
    assert not list(short_folder.iterdir())

    def refuse(*args: object) -> None:
        raise ValueError("no shared memory")

    monkeypatch.setattr("trimtab.ranks.create_resources", refuse)
    with pytest.raises(ValueError, match="no shared memory"):
        open_llm(mixtral, data_parallel_size=2)
    assert not list(short_folder.iterdir())


def test_start_that_a_rank_cannot_complete_fails_with_its_reason(mixtral, monkeypatch) -> None:
    from trimtab import ranks

    load_model = ranks.load_model

    def load(*args, rank: int, **options):
        if rank == 1:
            raise ValueError("tensor t in file f has 3 bytes, which is not enough")
        return load_model(*args, rank=rank, **options)

    monkeypatch.setattr(ranks, "load_model", load)
    with pytest.raises(ValueError, match=r"^rank 1: tensor t in file f has 3 bytes"):
        open_llm(mixtral, data_parallel_size=2)


COMMAND = [sys.executable, "-m", "trimtab", "generate", "--max-tokens", "2000", "--ignore-eos",
           "--max-model-len", "500", "--kv-cache-memory-bytes", "8MiB", "--num-threads", "1", "--prompt", "a",
           "--json"]  # fmt: skip


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A place for sockets: the kernel allows their paths 107 bytes, which a test's own folder may use up."""
    with tempfile.TemporaryDirectory(prefix="tt", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("end", ["worker SIGKILL", "SIGTERM"])
def test_command_ends_with_its_workers_and_not_with_zero(tmp_path, short_folder, end) -> None:
    """B123: a worker lost while it starts, or SIGTERM; no process and no folder stays behind."""
    path = make_tiny_checkpoint(tmp_path / "model", with_tokenizer=True)
    scratch = short_folder
    run = subprocess.Popen(
        [*COMMAND, "--model", str(path), "--data-parallel-size", "2", "--enable-expert-parallel"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    workers = []
    while not any(folder.joinpath("rank-1").exists() for folder in scratch.glob("trimtab-*")):
        assert run.poll() is None, run.stderr and run.stderr.read()
    while len(workers) < 2:
        workers = children_of(run.pid)
    if end == "worker SIGKILL":
        os.kill(workers[1], signal.SIGKILL)
    else:
        run.send_signal(getattr(signal, end))
    _, err = run.communicate(timeout=60)
    if end == "worker SIGKILL":
        assert run.returncode == 3 and err.startswith("error: rank 1: ") and "SIGKILL" in err, err
    else:
        assert run.returncode == 143, err
    began = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in workers):  # one that had just started has yet to see the end
        assert time.monotonic() - began < 5
        time.sleep(0.05)
    assert not list(scratch.iterdir())


def test_command_gives_the_same_answer_with_two_ranks(tmp_path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", with_tokenizer=True)
    with LLM(str(path), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        (expected,) = llm.generate("Grüße", params, use_tqdm=False)[0].outputs
    command = [sys.executable, "-m", "trimtab", "generate", "--model", str(path), "--prompt", "Grüße", "--json",
               "--temperature", "0", "--max-tokens", "8", "--num-threads", "1", "--max-model-len", "64",
               "--data-parallel-size", "2", "--enable-expert-parallel"]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    (found,) = json.loads(run.stdout)["outputs"]
    assert found["token_ids"] == expected.token_ids and found["text"] == expected.text
