"""All a user can set about an engine, by the names vLLM users know. A room gets its own part, never the whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.experts.control.config import EplbConfig

QUANTIZATIONS = (None, "int8")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL_RUNNERS = ("v2", "v1")
EXECUTOR_BACKENDS = (None, "inline", "threads", "mp")
ALL2ALL_BACKENDS = (None, "shared_memory", "gloo")
MAX_RANKS = 1024
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def parse_bytes(name: str, value: int | float | str) -> int:
    """Bytes from a number or from text such as "512MiB" or "2GB"."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", value.lower())
        if match is None:
            raise ValueError(f"{name} ({value!r}) must be a number of bytes; write it as 536870912, 512MiB or 2GB")
        value = float(match[1]) * _UNITS[match[2] or ""]
    if isinstance(value, bool) or not 0 < value <= 2**62:
        raise ValueError(f"{name} ({value!r}) must be above 0 bytes and at most 2**62; try 1GiB")
    return int(value)


def _check_integer(name: str, value: Any, low: int, high: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} ({value!r}) must be an integer in [{low}, {high}]; {remedy}")


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(repr, allowed))}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine's configuration. Raises `ValueError` naming the field, its value, the range and a remedy."""

    model: str = _option("demo", "a folder with a Hugging Face MoE checkpoint (safetensors), or 'demo'")
    dtype: str = _option("auto", "weights and activations: auto (as in the checkpoint), float32, bfloat16, float16")
    quantization: str | None = _option(None, "store experts in another format than dtype: int8; default: in dtype")
    max_model_len: int | None = _option(
        None, "longest prompt plus output; default: the model's, or what the KV cache holds"
    )
    max_num_seqs: int = _option(128, "requests that run at the same time")
    max_num_batched_tokens: int = _option(2048, "tokens computed per step; longer prompts are computed in chunks")
    block_size: int = _option(32, "tokens per KV cache block")
    enable_prefix_caching: bool = _option(True, "reuse the KV cache of equal prompt beginnings")
    kv_cache_memory_bytes: int | str | None = _option(
        None, "memory for the KV cache, e.g. 2GiB; default: from what is free"
    )
    seed: int = _option(0, "seed of requests that bring none of their own")
    model_runner: str = _option("v2", "v2, or v1: the small synchronous reference runner")
    async_depth: int | None = _option(
        None, "steps in flight, 1 or 2; default: 2 where the device works on its own, 1 on the CPU"
    )
    num_threads: int | None = _option(
        None, "threads each rank computes with; default: the cores this process may use, over the ranks"
    )
    data_parallel_size: int = _option(1, "ranks that serve requests of their own; the limits above are each one's")
    tensor_parallel_size: int = _option(1, "ranks that run the same tokens and share their experts")
    enable_expert_parallel: bool = _option(False, "spread each MoE layer's experts over all ranks")
    num_redundant_experts: int = _option(0, "replicas per MoE layer; initial_placement says of which experts")
    initial_placement: str | None = _option(None, "JSON file that says which expert lives in which slot")
    enable_eplb: bool = _option(False, "move hot experts between ranks in the background while serving")
    eplb_config: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "settings of that, as JSON or one by one: --eplb-config.window_size 100 (docs/eplb.md)"},
    )
    enable_return_routed_experts: bool = _option(
        False, "capture which experts each token used, for requests to return (docs/routed-experts.md)"
    )
    distributed_executor_backend: str | None = _option(
        None, "inline (one rank), threads or mp (a process per rank); default: inline for one rank, else mp"
    )
    all2all_backend: str | None = _option(
        None, "how tokens reach their experts' ranks: shared_memory or gloo; default: what serves here"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(
                f"model ({self.model!r}) must name a checkpoint folder; 'demo' is a small one to start with"
            )
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("quantization", self.quantization, QUANTIZATIONS)
        if self.max_model_len is not None:
            _check_integer("max_model_len", self.max_model_len, 2, 2**24, "leave it out to take the model's")
        _check_integer("max_num_seqs", self.max_num_seqs, 1, 2**16, "128 is a good start")
        _check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20, "2048 is a good start")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), for a step gives every running request a token; "
                f"try {max(self.max_num_seqs, 512)}"
            )
        _check_integer("block_size", self.block_size, 1, 4096, "32 is a good start")
        if self.kv_cache_memory_bytes is not None:
            object.__setattr__(
                self, "kv_cache_memory_bytes", parse_bytes("kv_cache_memory_bytes", self.kv_cache_memory_bytes)
            )
        _check_integer("seed", self.seed, 0, 2**63 - 1, "0 is the default")
        _check_choice("model_runner", self.model_runner, MODEL_RUNNERS)
        if self.async_depth is not None:
            _check_integer("async_depth", self.async_depth, 1, 2, "leave it out to let the device decide")
        if self.model_runner == "v1" and self.async_depth == 2:
            raise ValueError("async_depth (2) needs model_runner 'v2'; the reference runner 'v1' is synchronous")
        if self.num_threads is not None:
            _check_integer(
                "num_threads", self.num_threads, 1, 4096, "leave it out to use the cores this process may use"
            )
        self._check_ranks()
        self._check_eplb()

    def _check_ranks(self) -> None:
        for name in ("data_parallel_size", "tensor_parallel_size"):
            _check_integer(name, getattr(self, name), 1, MAX_RANKS, "1 is a single rank")
            if getattr(self, name) > 1 and not self.enable_expert_parallel:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) above 1 needs enable_expert_parallel: ranks share the experts of "
                    "MoE layers; switch it on or take one rank"
                )
        if self.num_ranks > MAX_RANKS:
            raise ValueError(
                f"data_parallel_size ({self.data_parallel_size}) * tensor_parallel_size ({self.tensor_parallel_size}) "
                f"must be at most {MAX_RANKS} ranks; lower one of them"
            )
        _check_integer("num_redundant_experts", self.num_redundant_experts, 0, 2**16, "0 adds no replica")
        if self.num_redundant_experts and self.initial_placement is None and not self.enable_eplb:
            raise ValueError(
                f"num_redundant_experts ({self.num_redundant_experts}) needs initial_placement, the file that says "
                "which experts have replicas; give it or set 0"
            )
        if self.initial_placement is not None and not self.enable_expert_parallel:
            raise ValueError(
                f"initial_placement ({self.initial_placement!r}) needs enable_expert_parallel; switch it on or leave "
                "the placement out"
            )
        _check_choice("distributed_executor_backend", self.distributed_executor_backend, EXECUTOR_BACKENDS)
        if self.distributed_executor_backend == "inline" and self.num_ranks > 1:
            raise ValueError(
                f"distributed_executor_backend ('inline') runs one rank, not {self.num_ranks}; use 'mp' or 'threads'"
            )
        _check_choice("all2all_backend", self.all2all_backend, ALL2ALL_BACKENDS)

    def _check_eplb(self) -> None:
        if self.model_runner == "v1" and (self.enable_eplb or self.eplb_config is not None):
            name = "enable_eplb" if self.enable_eplb else "eplb_config"
            raise ValueError(
                f"{name} needs model_runner 'v2'; the reference runner 'v1' moves no experts; leave one of them out"
            )
        if not self.enable_eplb:
            if self.eplb_config is not None:
                raise ValueError(f"eplb_config ({self.eplb_config!r}) needs enable_eplb; switch it on or leave it out")
            return
        if not self.enable_expert_parallel:
            raise ValueError("enable_eplb needs enable_expert_parallel: experts move between its ranks; switch it on")
        eplb = self.eplb
        for name in ("num_redundant_experts", "initial_placement"):
            if getattr(self, name) and getattr(eplb, name):
                raise ValueError(
                    f"{name} ({getattr(self, name)!r}) and eplb_config's {name} ({getattr(eplb, name)!r}) are one "
                    "setting; give it once"
                )

    @property
    def eplb(self) -> EplbConfig:
        """`eplb_config` as a record. Raises `ValueError` naming the key."""
        from trimtab.experts.control.config import eplb_config_from

        if self.eplb_config is not None and not isinstance(self.eplb_config, Mapping):
            raise ValueError(f"eplb_config ({self.eplb_config!r}) must be a mapping of keys to values")
        return eplb_config_from(self.eplb_config)

    @property
    def redundant_experts(self) -> int:
        """Replicas per MoE layer, wherever they were asked for."""
        return self.num_redundant_experts or (self.eplb.num_redundant_experts if self.enable_eplb else 0)

    @property
    def placement_file(self) -> str | None:
        """`initial_placement`, wherever it was given."""
        return self.initial_placement or (self.eplb.initial_placement if self.enable_eplb else None)

    @property
    def num_ranks(self) -> int:
        """All of them: they share the experts (EP size)."""
        return self.data_parallel_size * self.tensor_parallel_size

    @property
    def executor_backend(self) -> str:
        """`distributed_executor_backend`, or the default for this many ranks."""
        return self.distributed_executor_backend or ("inline" if self.num_ranks == 1 else "mp")


def engine_options() -> dict[str, tuple[Any, str]]:
    """Option name -> (default, one line of help), in declaration order; the command line is made from this."""
    return {option.name: (option.default, option.metadata["help"]) for option in fields(EngineConfig)}


def config_from_options(options: dict[str, Any]) -> EngineConfig:
    """An `EngineConfig` from keyword arguments. An unknown name is an error that lists near ones."""
    known = engine_options()
    for name in options:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"{name} is not an engine option; {hint}")
    return EngineConfig(**options)
