"""What expert balancing works with: one list, for start-up, `trimtab inspect` and the table in the docs.

What is not admitted here is refused before a process group, a thread or a buffer exists. A pair of format and kernel
is admitted by its conformance suite (moving changes what the kernel reads, and nothing else), a way of running by its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trimtab.experts.formats.movable import MOVABLE

ADMITTED_DISPATCHERS = ("shared_memory", "gloo")
ADMITTED_EXECUTORS = ("threads", "mp")
ADMITTED_COMMUNICATORS = ("torch_gloo", "shared_memory")
MAX_ASYNC_DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionFacts:
    """How an engine is to run, in plain values; the defaults are the simplest that can be balanced."""

    model_runner: str = "v2"
    enable_expert_parallel: bool = True
    num_ranks: int = 2
    executor: str = "mp"
    dispatcher: str = "shared_memory"
    communicator: str = "shared_memory"
    async_depth: int = 1
    expert_format: str = "bfloat16"
    kernel: str = "native"
    experts_per_layer: tuple[int, ...] = (8, 8)  # of the MoE layers


@dataclass(frozen=True, slots=True)
class _Rule:
    """One row of the table. `refusal` says what is wrong with facts, or nothing."""

    what: str
    supported: str
    refusal: Callable[[ExecutionFacts], str]


def unsupported(facts: ExecutionFacts) -> list[str]:
    """Why this engine's experts cannot be balanced: all reasons, each with key, value and what is allowed."""
    return [reason for rule in _RULES if (reason := rule.refusal(facts))]


def support_table() -> str:
    """The same rules for people, in Markdown."""
    rows = [f"| {rule.what} | {rule.supported} |" for rule in _RULES]
    return "\n".join(["| with `enable_eplb` | supported |", "|---|---|", *rows])


def _in_words(values: tuple[str, ...]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value in allowed:
        return ""
    return f"{key} ({value!r}) must be one of {', '.join(map(repr, allowed))} with enable_eplb; choose one of them"


def _model_runner(facts: ExecutionFacts) -> str:
    return _one_of("model_runner", facts.model_runner, ("v2",))


def _expert_parallel(facts: ExecutionFacts) -> str:
    if facts.enable_expert_parallel:
        return ""
    return "enable_expert_parallel (False) must be True with enable_eplb: experts move between its ranks; switch it on"


def _num_ranks(facts: ExecutionFacts) -> str:
    if facts.num_ranks > 1:
        return ""
    return (
        f"data_parallel_size * tensor_parallel_size ({facts.num_ranks}) must be at least 2 with enable_eplb: one rank "
        "has nothing to balance; raise one of them or leave enable_eplb out"
    )


def _executor(facts: ExecutionFacts) -> str:
    return _one_of("distributed_executor_backend", facts.executor, ADMITTED_EXECUTORS)


def _dispatcher(facts: ExecutionFacts) -> str:
    return _one_of("all2all_backend", facts.dispatcher, ADMITTED_DISPATCHERS)


def _communicator(facts: ExecutionFacts) -> str:
    return _one_of("eplb_config.communicator", facts.communicator, ADMITTED_COMMUNICATORS)


def _async_depth(facts: ExecutionFacts) -> str:
    if 1 <= facts.async_depth <= MAX_ASYNC_DEPTH:
        return ""
    return f"async_depth ({facts.async_depth}) must be in [1, {MAX_ASYNC_DEPTH}] with enable_eplb; lower it"


def _storage(facts: ExecutionFacts) -> str:
    if (facts.expert_format, facts.kernel) in MOVABLE:
        return ""
    kernels = sorted(kernel for expert_format, kernel in MOVABLE if expert_format == facts.expert_format)
    allowed = f"the kernels for it are {', '.join(kernels)}" if kernels else f"formats are {', '.join(_formats())}"
    return (
        f"experts in format {facts.expert_format!r} with kernel {facts.kernel!r} must have passed the conformance "
        f"suite of slot storage to be moved, and have not; {allowed}"
    )


def _layers(facts: ExecutionFacts) -> str:
    sizes = facts.experts_per_layer
    if not sizes:
        return "the model has 0 MoE layers and must have at least 1 with enable_eplb; leave enable_eplb out"
    other = next((layer for layer, size in enumerate(sizes) if size != sizes[0]), None)
    if other is None:
        return ""
    return (
        f"MoE layer {other} has {sizes[other]} experts and must have {sizes[0]} as layer 0 with enable_eplb: one "
        "placement holds for all layers; leave enable_eplb out"
    )


def _formats() -> tuple[str, ...]:
    return tuple(sorted({expert_format for expert_format, _ in MOVABLE}))


def _storage_in_words() -> str:
    by_kernel: dict[str, list[str]] = {}
    for stored in sorted(MOVABLE):
        by_kernel.setdefault(stored.kernel, []).append(stored.format)
    return "; ".join(f"{kernel}: {_in_words(tuple(formats))}" for kernel, formats in sorted(by_kernel.items()))


_RULES = (
    _Rule("`model_runner`", "`v2`", _model_runner),
    _Rule("`enable_expert_parallel`", "on", _expert_parallel),
    _Rule("ranks (`data_parallel_size` x `tensor_parallel_size`)", "2 or more", _num_ranks),
    _Rule("`distributed_executor_backend`", _in_words(ADMITTED_EXECUTORS), _executor),
    _Rule("`all2all_backend`", _in_words(ADMITTED_DISPATCHERS), _dispatcher),
    _Rule("`eplb_config.communicator`", _in_words(ADMITTED_COMMUNICATORS), _communicator),
    _Rule("`async_depth`", f"1 to {MAX_ASYNC_DEPTH}", _async_depth),
    _Rule("experts' format and kernel", _storage_in_words(), _storage),
    _Rule("number of experts", "the same in all MoE layers", _layers),
)
