"""The composition root: builds the parts of an engine from a configuration and hands them to each other."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config import EngineConfig
from trimtab.engine.balancing import Balancer
from trimtab.engine.config import CacheConfig, SchedulerConfig
from trimtab.engine.engine import Engine
from trimtab.engine.executor.worker import Worker
from trimtab.engine.kv_cache import longest_request, peak_blocks
from trimtab.engine.stop import eos_token_ids
from trimtab.experts.data.dispatch.choice import DispatchPlan
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.placement_file import read_placement
from trimtab.experts.routed_experts import (
    RoutedExpertsLayout,
    get_routed_experts_attn_gid,
    routed_experts_layout,
)
from trimtab.kernels.features import memory
from trimtab.models.language_model import LanguageModel
from trimtab.models.resolve import resolve_model
from trimtab.models.spec import ModelSpec, read_spec
from trimtab.observability.events import EventLog
from trimtab.plan import KVCacheConfig
from trimtab.ranks import RankSetup, plan_dispatch, start_ranks
from trimtab.runner.attention import group_layers, kv_cache_bytes_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trimtab.experts.movement.choice import MovementPlan

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # stage, done, total

# Without a wish, the KV cache takes this share of the memory that the weights leave, and no more than requests can use.
KV_SHARE = 0.5
# Activations, workspaces and the interpreter: kept free beside weights and KV cache.
RESERVE_BYTES = 512 * 2**20


@dataclass(slots=True)
class Parts:
    """An engine and what it was built from."""

    engine: Engine
    models: list[LanguageModel]  # of this process, by rank; none where ranks are processes
    workers: list[Worker]  # likewise
    spec: ModelSpec
    tokenizer: PreTrainedTokenizerBase | None
    memory_bytes: dict[str, int]  # over all ranks
    rank_facts: list[dict[str, int]]
    start_up_s: dict[str, float]
    max_model_len: int
    events: EventLog


def assemble(config: EngineConfig, progress: Progress | None = None) -> Parts:
    """Builds an engine. Raises `ValueError` for what a person can mend, before weights are read where possible."""
    clock = _Clock()
    report = progress or (lambda stage, done, total: None)
    path = resolve_model(config.model, progress)

    spec = read_spec(path, config.dtype, config.quantization)
    logger.info("routing: %s", spec.routing or "as the family does it")
    placement = plan_placement(config, spec)
    dispatch = plan_dispatch(config, spec)
    movement = plan_movement(config, spec, placement, dispatch)
    tokenizer = load_tokenizer(path)
    staging_bytes = 0 if movement is None else movement.num_bytes
    available_bytes = memory().available_bytes - dispatch.shared_bytes - staging_bytes
    kv_cache, max_model_len = plan_kv_cache(config, spec, available_bytes, rank_weight_bytes(spec, placement))
    routed_experts = plan_routed_experts(config, spec, kv_cache)
    events = EventLog()
    balancer = plan_balancer(config, spec, placement, movement, events)
    clock.lap("plan")

    setup = RankSetup(config, path, kv_cache, max_model_len, placement, dispatch, movement)
    try:
        ranks = start_ranks(setup, spec, report)
    except BaseException:
        if balancer is not None:
            balancer.close()
        raise
    clock.lap("load")

    engine = Engine(
        ranks.executor,
        kv_cache,
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            async_depth=config.async_depth or 1,  # the CPU computes as it launches: docs/decisions/0003
        ),
        vocab_size=spec.vocab_size,
        data_parallel_size=config.data_parallel_size,
        cache=CacheConfig(block_size=config.block_size, enable_prefix_caching=config.enable_prefix_caching),
        tokenizer=tokenizer,
        eos_token_ids=end_token_ids(spec, tokenizer),
        seed=config.seed,
        balancer=balancer,
        routed_experts=routed_experts,
    )
    clock.lap("build")
    held = held_bytes(setup, spec, ranks.facts, engine)
    return Parts(
        engine, ranks.models, ranks.workers, spec, tokenizer, held, ranks.facts, clock.laps, max_model_len, events
    )


def held_bytes(setup: RankSetup, spec: ModelSpec, facts: list[dict[str, int]], engine: Engine) -> dict[str, int]:
    """Memory by what it is for, over all ranks; "redundant_experts" are part of "weights"."""
    num_ranks, placement = setup.config.num_ranks, setup.placement
    held = {
        "weights": num_ranks * rank_weight_bytes(spec, placement),
        "kv_cache": sum(rank["kv_cache_bytes"] for rank in facts),
    }
    if setup.config.enable_return_routed_experts:
        captured = sum(rank["routed_experts_bytes"] for rank in facts)
        held["routed_experts"] = captured + sum(rank.row_store.num_bytes for rank in engine.scheduler.ranks)
    if placement is not None and placement.topology.num_redundant:
        held["redundant_experts"] = held["weights"] - num_ranks * rank_weight_bytes(spec, placement, spare=False)
    if setup.movement is not None:
        held["staging"] = setup.movement.num_bytes
    return held


def plan_placement(config: EngineConfig, spec: ModelSpec) -> Placement | None:
    """Which expert lives in which slot; None where one rank holds each expert once.

    Raises `ValueError` where the slots do not divide over the ranks, or the file says something else.
    """
    if config.num_ranks == 1 and config.placement_file is None and not config.enable_eplb:
        return None
    counts = sorted({layer.num_experts for layer in spec.moe_layers})
    if len(counts) != 1:
        raise ValueError(
            f"enable_expert_parallel needs MoE layers with one number of experts; {spec.path.name} has {counts}; "
            "take one rank"
        )
    topology = Topology(counts[0], config.redundant_experts, config.num_ranks)
    if config.placement_file is not None:
        return read_placement(config.placement_file, topology, len(spec.moe_layers))
    return Placement.initial(topology, len(spec.moe_layers))


def plan_routed_experts(config: EngineConfig, spec: ModelSpec, kv_cache: KVCacheConfig) -> RoutedExpertsLayout | None:
    """The form of the rows that workers capture and the engine stores; None where it is off.

    Raises `ValueError` for a model whose rows have no form, or no KV cache group to be stored by.
    """
    if not config.enable_return_routed_experts:
        return None
    get_routed_experts_attn_gid(kv_cache)
    return routed_experts_layout(spec.moe_layers)


def plan_movement(
    config: EngineConfig, spec: ModelSpec, placement: Placement | None, dispatch: DispatchPlan
) -> MovementPlan | None:
    """How experts move between slots; None where they do not.

    Raises `ValueError` with all reasons why they cannot be balanced here, before anything is started or allocated.
    """
    if not config.enable_eplb:
        return None
    from trimtab.experts.balancer import ExecutionFacts, plan_rank_movement  # off means absent

    assert placement is not None, "experts move between the slots of a placement"
    return plan_rank_movement(
        config.eplb,
        placement,
        [layer.shape for layer in spec.moe_layers],
        spec.dtype,
        spec.quantization,
        ExecutionFacts(
            model_runner=config.model_runner,
            enable_expert_parallel=config.enable_expert_parallel,
            num_ranks=config.num_ranks,
            executor=config.executor_backend,
            dispatcher=dispatch.backend,
            async_depth=config.async_depth or 1,
            experts_per_layer=tuple(layer.num_experts for layer in spec.moe_layers),
        ),
    )


def eplb_refusal(config: EngineConfig, spec: ModelSpec) -> str:
    """Why experts of this model are not balanced under `config`, which switches it on; empty where they are."""
    try:
        placement = plan_placement(config, spec)
        plan_movement(config, spec, placement, plan_dispatch(config, spec))
    except ValueError as error:
        return str(error)
    return ""


def plan_balancer(
    config: EngineConfig,
    spec: ModelSpec,
    placement: Placement | None,
    movement: MovementPlan | None,
    events: EventLog,
) -> Balancer | None:
    if movement is None:
        return None
    from trimtab.experts.balancer import build_controller

    assert placement is not None
    return build_controller(
        config.eplb, placement, slot_nbytes=movement.slot_nbytes, model_name=spec.path.name, observer=events
    )


def rank_weight_bytes(spec: ModelSpec, placement: Placement | None, *, spare: bool = True) -> int:
    """Weights of one rank: everything dense, and the experts of its slots, with or without the redundant ones."""
    if placement is None:
        return spec.num_bytes
    topology = placement.topology
    per_slot = spec.num_expert_bytes // topology.num_experts
    num_slots = topology.slots_per_rank if spare else topology.num_experts // topology.num_ranks
    return spec.num_bytes - spec.num_expert_bytes + num_slots * per_slot


def plan_kv_cache(
    config: EngineConfig, spec: ModelSpec, available_bytes: int, weight_bytes: int | None = None
) -> tuple[KVCacheConfig, int]:
    """A rank's KV cache and the final longest request, from what was asked for and what memory is left.

    `available_bytes` are those of this machine, which all ranks share; `weight_bytes` those that one rank holds.
    With `max_model_len` given, a cache that cannot hold one such request is an error; without, the length is fitted.
    """
    limit = config.max_model_len or spec.max_position
    if limit > spec.max_position:
        raise ValueError(
            f"max_model_len ({limit}) must be at most {spec.max_position}, the longest context of {spec.architecture} "
            f"in {spec.path.name}; lower it or leave it out"
        )
    groups = group_layers(spec.attention_layers, spec.dtype)
    block_bytes = config.block_size * kv_cache_bytes_per_token(spec.attention_layers, spec.dtype)
    available_bytes //= config.num_ranks
    each = f" for each of {config.num_ranks} ranks" if config.num_ranks > 1 else ""
    if weight_bytes is None:
        weight_bytes = spec.num_bytes
    left_bytes = available_bytes - weight_bytes - RESERVE_BYTES
    if config.enable_return_routed_experts:  # each block of the cache has its rows stored beside it
        row_bytes = config.block_size * routed_experts_layout(spec.moe_layers).slot_bytes
        left_bytes = left_bytes * block_bytes // (block_bytes + row_bytes)
    if left_bytes < block_bytes * 2:
        raise ValueError(
            f"not enough memory: {spec.path.name} needs {_gib(weight_bytes)} for its weights and at least "
            f"{_gib(RESERVE_BYTES + 2 * block_bytes)} to work in{each}; {_gib(available_bytes)} are free{each}. "
            "Free some, or take a smaller model or dtype"
        )

    def with_blocks(num_blocks: int) -> KVCacheConfig:
        return KVCacheConfig(config.block_size, num_blocks, groups)

    asked_bytes = config.kv_cache_memory_bytes
    if asked_bytes is not None:
        assert isinstance(asked_bytes, int), "parsed by EngineConfig"
        if asked_bytes > left_bytes:
            raise ValueError(
                f"kv_cache_memory_bytes ({_gib(asked_bytes)}) must be at most {_gib(left_bytes)}: "
                f"{_gib(available_bytes)} are free and the weights take {_gib(weight_bytes)}{each}; lower it"
            )
        num_blocks = asked_bytes // block_bytes
    else:
        most_useful = 1 + config.max_num_seqs * peak_blocks(with_blocks(1), limit - 1, config.max_num_batched_tokens)
        num_blocks = min(int(left_bytes * KV_SHARE) // block_bytes, most_useful)
    longest = longest_request(with_blocks(num_blocks), config.max_num_batched_tokens, limit)
    wanted = limit if config.max_model_len else 2
    if longest < wanted:
        needed = 1 + peak_blocks(with_blocks(1), wanted - 1, config.max_num_batched_tokens)
        raise ValueError(
            f"KV cache of {_gib(num_blocks * block_bytes)} holds requests of up to {longest} tokens, fewer than "
            f"max_model_len ({wanted}); give kv_cache_memory_bytes at least {needed * block_bytes} "
            f"({_gib(needed * block_bytes)}) or lower max_model_len"
        )
    if longest < limit:
        logger.info("max_model_len: %d, what the KV cache holds, of the model's %d", longest, limit)
    return with_blocks(num_blocks), longest


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None where it brings none (prompts are then token ids)."""
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # each tokenizer class fails in its own way on a damaged file
        raise ValueError(
            f"the tokenizer files of {path} cannot be read ({type(error).__name__}: {error}); download them again"
        ) from error


def read_generation_config(path: Path) -> dict[str, Any]:
    """`generation_config.json` as it stands; empty without one."""
    file = path / "generation_config.json"
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); restore it from the model's source") from error
    return content if isinstance(content, dict) else {}


def end_token_ids(spec: ModelSpec, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that ends a sequence, from all three sources (B121)."""
    text_config = spec.hf_config.get_text_config()
    try:
        return eos_token_ids(
            read_generation_config(spec.path).get("eos_token_id"),
            getattr(text_config, "eos_token_id", None),
            getattr(tokenizer, "eos_token_id", None),
        )
    except ValueError as error:
        raise ValueError(f"{spec.path}: {error}") from error


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.2f} MiB"


class _Clock:
    """Seconds of each stage of start-up."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage] = now - self._last
        self._last = now
