"""`trimtab inspect`: what a checkpoint is and needs, read from its configuration and tensor headers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trimtab.cli.layout import format_bytes, format_count, kv_bytes_per_token, rank_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trimtab.models.spec import ModelSpec

EXIT_UNSUPPORTED = 1


def _span(layer_ids: Iterable[int]) -> str:
    """Layer ids with runs drawn together: 0-3, 8."""
    runs: list[list[int]] = []
    for layer_id in layer_ids:
        if runs and layer_id == runs[-1][1] + 1:
            runs[-1][1] = layer_id
        else:
            runs.append([layer_id, layer_id])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def bytes_on_disk(path: Path) -> int:
    """Sizes of the files that the checkpoint's tensors lie in."""
    from trimtab.models.checkpoint import Checkpoint

    return sum(file.stat().st_size for file in {stored.file for stored in Checkpoint.open(path).tensors.values()})


def describe(spec: ModelSpec, num_ranks: int, num_redundant_experts: int) -> dict[str, Any]:
    """Everything `trimtab inspect --json` prints about a model that runs."""
    memory = rank_memory(spec, num_ranks, num_redundant_experts)
    windows = sorted({layer.window for layer in spec.attention_layers if layer.window is not None})
    return {
        "path": str(spec.path),
        "supported": True,
        "architecture": spec.architecture,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_position": spec.max_position,
        "num_parameters": spec.num_parameters,
        "num_active_parameters": spec.num_active_parameters,
        "bytes_on_disk": bytes_on_disk(spec.path),
        "moe": [
            {
                "layer_id": layer.layer_id,
                "num_experts": layer.num_experts,
                "top_k": layer.top_k,
                "intermediate_size": layer.shape.intermediate_size,
                "expert_parameters": layer.shape.num_parameters,
            }
            for layer in spec.moe_layers
        ],
        "routing": spec.routing,
        "attention": {
            "num_layers": len(spec.attention_layers),
            "windows": windows,
            "num_windowed_layers": sum(layer.window is not None for layer in spec.attention_layers),
            "has_sinks": any(layer.has_sinks for layer in spec.attention_layers),
        },
        "kv_bytes_per_token": kv_bytes_per_token(spec),
        "kv_bytes_per_token_windowed": kv_bytes_per_token(spec, windowed=True),
        "layout": {
            "data_parallel_size": num_ranks,
            "num_redundant_experts": num_redundant_experts,
            "num_slots_per_layer": memory.num_slots_per_layer,
            "dense_bytes_per_rank": memory.dense_bytes,
            "expert_bytes_per_rank": memory.expert_bytes,
            "weight_bytes_per_rank": memory.weight_bytes,
        },
        "eplb": _eplb(spec, max(2, num_ranks), num_redundant_experts),
    }


def _eplb(spec: ModelSpec, num_ranks: int, num_redundant_experts: int) -> dict[str, Any]:
    """Whether experts can be balanced on so many ranks, and why not."""
    from trimtab.assemble import eplb_refusal
    from trimtab.config import EngineConfig

    config = EngineConfig(
        model=str(spec.path),
        data_parallel_size=num_ranks,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config={"num_redundant_experts": num_redundant_experts},
    )
    reason = eplb_refusal(config, spec)
    return {"supported": not reason, "data_parallel_size": num_ranks, "reason": reason}


def _refused(path: Path, reason: str) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    architectures = config.get("architectures") or [config.get("model_type")]
    return {"path": str(path), "supported": False, "architecture": architectures[0], "reason": reason}


def _moe_lines(spec: ModelSpec) -> list[str]:
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for layer in spec.moe_layers:
        kinds.setdefault((layer.num_experts, layer.top_k, layer.shape.intermediate_size), []).append(layer.layer_id)
    return [
        f"{len(layers)} of {spec.num_layers} ({_span(layers)}): {experts} experts, top-{top_k}, inner size {inner}"
        for (experts, top_k, inner), layers in kinds.items()
    ]


def _attention_lines(spec: ModelSpec) -> list[str]:
    kinds = Counter(
        (layer.num_heads, layer.num_kv_heads, layer.key_size, layer.value_size, layer.window, layer.has_sinks)
        for layer in spec.attention_layers
    )
    lines = []
    for (heads, kv_heads, key_size, value_size, window, has_sinks), count in kinds.items():
        size = f"{key_size}" if key_size == value_size else f"{key_size} (values {value_size})"
        extras = (f", window {window}" if window else "") + (", sinks" if has_sinks else "")
        lines.append(f"{count} layers: {heads} heads, {kv_heads} KV heads, head size {size}{extras}")
    return lines


def rows(spec: ModelSpec, facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What people read, as (name, text)."""
    layout = facts["layout"]
    kv_bytes = facts["kv_bytes_per_token"]
    share = spec.num_active_parameters / spec.num_parameters
    active, full_length = format_count(spec.num_active_parameters), format_bytes(kv_bytes * spec.max_position)
    shown = [
        ("runs", "yes"),
        ("architecture", f"{spec.architecture}, {facts['dtype']}"),
        ("parameters", f"{format_count(spec.num_parameters)}, {active} active per token ({share:.0%})"),
        ("on disk", format_bytes(facts["bytes_on_disk"])),
        *(("MoE layers", line) for line in _moe_lines(spec)),
        ("routing", ", ".join(f"{key} {value}" for key, value in spec.routing.items()) or "as the family does it"),
        *(("attention", line) for line in _attention_lines(spec)),
        ("sizes", f"hidden {spec.hidden_size}, vocabulary {spec.vocab_size:,}, {spec.max_position:,} positions"),
        ("KV cache", f"{format_bytes(kv_bytes)} per token, {full_length} for one sequence of full length"),
    ]
    if facts["kv_bytes_per_token_windowed"]:
        windowed = format_bytes(facts["kv_bytes_per_token_windowed"])
        shown.append(("", f"of it {windowed} per token in layers that keep only their window"))
    eplb = facts["eplb"]
    shown.append(("balancing", f"--enable-eplb on {eplb['data_parallel_size']} ranks: {eplb['reason'] or 'yes'}"))
    ranks, redundant = layout["data_parallel_size"], layout["num_redundant_experts"]
    where = "one process" if ranks == 1 else f"each of {ranks} ranks"
    extra = f", {redundant} of them redundant" if redundant and ranks == 1 else ""
    shown.append(("memory", f"{where}: {format_bytes(layout['weight_bytes_per_rank'])} of weights"))
    dense, experts = format_bytes(layout["dense_bytes_per_rank"]), format_bytes(layout["expert_bytes_per_rank"])
    shown.append(
        ("", f"dense {dense}, experts {experts} in {layout['num_slots_per_layer']} slots per MoE layer{extra}")
    )
    return shown


def _print_rows(title: str, lines: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    before = None
    for name, text in lines:
        table.add_row("" if name == before else name, Text(text))
        before = name
    console = Console()
    console.print(Text(title, style="bold cyan"))
    console.print(table)


def inspect(
    model: str | None = None,
    /,
    *,
    dtype: str = "auto",
    data_parallel_size: int = 1,
    num_redundant_experts: int = 0,
    kernels: Annotated[bool, Parameter(negative="")] = False,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Say what a checkpoint is, what it needs, and whether it runs. No weights are loaded.

    Exit code: 0 when the model runs, 1 when it is refused (and why), 2 when there is no readable checkpoint.

    Parameters
    ----------
    model
        A folder with a Hugging Face checkpoint, or demo.
    dtype
        What the weights would be loaded as: auto, float32, bfloat16 or float16.
    data_parallel_size
        Ranks that share the experts; memory is shown for one of them.
    num_redundant_experts
        Replicas per MoE layer, for the memory shown.
    kernels
        Also say which kernels this machine gets, and why.
    json_output
        Print one JSON object.
    """
    if model is None and not kernels:
        raise ValueError("no model; give a checkpoint folder or demo, or --kernels to look at this machine alone")
    facts: dict[str, Any] = {}
    lines: list[tuple[str, str]] = []
    if model is not None:
        facts, lines = _look_at(model, dtype, data_parallel_size, num_redundant_experts)
    if kernels:
        from trimtab.kernels.features import describe_kernels

        kernel_choices = describe_kernels()
    if json_output:
        if kernels:
            facts["kernels"] = [
                dict(zip(("name", "chosen", "reason"), choice, strict=True)) for choice in kernel_choices
            ]
        print(json.dumps(facts, indent=2))
    else:
        if facts:
            _print_rows(facts["path"], lines)
        if kernels:
            _print_rows("kernels", [(name, f"{chosen} ({reason})") for name, chosen, reason in kernel_choices])
    return EXIT_UNSUPPORTED if facts.get("supported") is False else 0


def _look_at(
    model: str, dtype: str, num_ranks: int, num_redundant_experts: int
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The facts about `model` and the lines that show them."""
    from trimtab.models.errors import UnsupportedModelError
    from trimtab.models.resolve import resolve_model
    from trimtab.models.spec import read_spec

    path = resolve_model(model)
    try:
        spec = read_spec(path, dtype)
    except UnsupportedModelError as error:
        facts = _refused(path, str(error))
        return facts, [("runs", "no"), ("architecture", str(facts["architecture"])), ("reason", str(error))]
    facts = describe(spec, num_ranks, num_redundant_experts)
    return facts, rows(spec, facts)
