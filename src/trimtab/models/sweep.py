"""Tries every architecture of the installed transformers that uses its experts plug point, with tiny random weights.

    python -m trimtab.models.sweep --markdown docs/supported-models.md

Each runs in a process of its own: packed, ragged and chunked through our plugs, against transformers' eager float32
forward of each sequence alone. "works" means the same logits; "refused" that start-up says no, by name; "differs" and
"broken" are ours to mend or to refuse.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

LENGTHS = (4, 8, 9, 40)  # around the tiny window of 8
CHUNKS = (3, 1, 5, 7)
TOLERANCE = 1e-4  # of logits whose spread is about 4
TIMEOUT_S = 120.0
DECORATOR = "@use_experts_implementation"


@dataclass(frozen=True, slots=True)
class SweepRow:
    """`status`: works, refused, differs or broken (an error that is not a refusal, a crash, or out of time)."""

    model_type: str
    architecture: str
    status: str
    reason: str = ""
    largest_difference: float | None = None


def sweep_names() -> list[str]:
    """model_type of every causal language model whose file uses the experts plug point."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        package = CONFIG_MAPPING[model_type].__module__.rpartition(".")[0]
        found = importlib.util.find_spec(f"{package}.modeling_{package.rpartition('.')[2]}")
        if found is not None and found.origin is not None and DECORATOR in Path(found.origin).read_text():
            names.append(model_type)
    return sorted(names)


def run_sweep(
    names: Sequence[str] | None = None,
    progress: Callable[[int, int, SweepRow], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[SweepRow]:
    """One row per model_type. `progress(done, in all, row)` is called after each; no crash of one ends the sweep."""
    # Children are forked from this process: what it has imported, none of them imports again.
    import trimtab.models.loading
    import trimtab.testing.checkpoints
    import trimtab.testing.packed  # noqa: F401

    chosen = list(sweep_names() if names is None else names)
    rows = []
    for done, model_type in enumerate(chosen, start=1):
        rows.append(_try_in_process(model_type, timeout_s))
        if progress is not None:
            progress(done, len(chosen), rows[-1])
    return rows


def _try_in_process(model_type: str, timeout_s: float) -> SweepRow:
    context = multiprocessing.get_context("fork")  # the parent has transformers imported and runs no network
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(model_type, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout_s):
            return receiver.recv()
        return SweepRow(model_type, "", "broken", f"took longer than {timeout_s:.0f} s")
    except EOFError:
        process.join()
        return SweepRow(model_type, "", "broken", f"the process died (exit code {process.exitcode})")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _send_row(model_type: str, sender: Connection) -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()  # ours counts architectures; this process ends with its one row
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        sender.send(try_architecture(model_type, Path(directory)))


def try_architecture(model_type: str, directory: Path) -> SweepRow:
    """Makes the checkpoint in `directory`, runs it both ways and compares."""
    from trimtab.models.errors import UnsupportedModelError
    from trimtab.models.network import network_class, refuse_by_config
    from trimtab.models.spec import probe_config
    from trimtab.testing.checkpoints import make_tiny_checkpoint, tiny_config

    architecture = ""
    try:
        config = tiny_config(model_type)
        architecture = network_class(config).__name__
        refuse_by_config(config)
        probe_config(config)
        difference = largest_difference(make_tiny_checkpoint(directory, model_type))
    except UnsupportedModelError as error:
        return SweepRow(model_type, architecture, "refused", str(error))
    except Exception as error:  # anything a network may do; the row tells
        return SweepRow(model_type, architecture, "broken", f"{type(error).__name__}: {error}".split("\n")[0])
    status = "works" if difference <= TOLERANCE else "differs"
    reason = "" if status == "works" else f"logits differ by {difference:.1e}"
    return SweepRow(model_type, architecture, status, reason, difference)


def largest_difference(path: Path) -> float:
    """Between packed, chunked logits through the plugs and transformers' own, over all positions of all sequences."""
    import torch
    from transformers import AutoModelForCausalLM

    from trimtab.models.loading import load_model
    from trimtab.models.spec import read_spec
    from trimtab.testing.packed import packed_logits

    spec = read_spec(path)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, spec.vocab_size, (length,), generator=generator) for length in LENGTHS]
    reference = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.inference_mode():
        expected = [reference(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences]
    found = packed_logits(load_model(spec), sequences, CHUNKS)
    differences = [(ours - theirs).abs().max() for ours, theirs in zip(found, expected, strict=True)]
    largest = float(torch.stack(differences).max())
    return largest if largest == largest else float("inf")


def to_markdown(rows: Sequence[SweepRow]) -> str:
    import transformers

    works = sum(row.status == "works" for row in rows)
    lines = [
        "# Supported models",
        "",
        f"Written by `python -m trimtab.models.sweep` against transformers {transformers.__version__}: every causal "
        f"language model that uses the experts plug point, with tiny random weights. {works} of {len(rows)} work.",
        "",
        "*works*: packed, ragged, chunked batches give transformers' eager float32 logits within "
        f"{TOLERANCE:.0e}. Everything else is refused at start-up, by name, before weights are read.",
        "",
        "| model_type | architecture | status | reason |",
        "|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.status != "works", row.model_type)):
        reason = row.reason.replace("|", "\\|").removeprefix(f"{row.architecture} is not supported: ")
        lines.append(f"| {row.model_type} | {row.architecture} | {row.status} | {reason} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m trimtab.models.sweep", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="model types; all when none is given")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)

    def show(done: int, total: int, row: SweepRow) -> None:
        print(f"{done}/{total} {row.model_type}: {row.status} {row.reason}", flush=True)

    rows = run_sweep(options.names or None, show)
    if options.markdown is not None:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(to_markdown(rows))


if __name__ == "__main__":
    main()
