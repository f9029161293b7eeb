"""`trimtab demo`: four kinds of text generated together, and a picture of the experts that each one used."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trimtab.cli.generate import open_llm
from trimtab.cli.options import EngineOptions, given
from trimtab.observability.progress import stderr_is_terminal

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from trimtab.llm import LLM
    from trimtab.outputs import RequestOutput

MODEL = "demo"
TITLES = {"code": "code", "english": "English", "german": "German", "maths": "maths"}


def expert_use(llm: LLM, token_ids: list[list[int]]) -> np.ndarray:
    """Tokens routed to each expert while these sequences pass through the network, [L, E]."""
    from trimtab.sampling_params import SamplingParams

    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with llm.expert_usage() as usage:
        llm.generate([{"prompt_token_ids": ids} for ids in token_ids], one_token, use_tqdm=False)
    return usage.counts.numpy()


def show_answers(console: Console, prompts: dict[str, list[str]], answers: dict[str, list[RequestOutput]]) -> None:
    from rich.padding import Padding
    from rich.rule import Rule
    from rich.text import Text

    for kind, texts in prompts.items():
        console.print(Rule(Text(TITLES.get(kind, kind), style="bold"), align="left", style="dim"))
        for text, output in zip(texts, answers[kind], strict=True):
            console.print(Text(text, style="bold cyan"))
            answer = output.outputs[0]
            tail = " …" if answer.finish_reason == "length" else ""
            console.print(Padding(Text(answer.text.strip() + tail), (0, 0, 1, 2), expand=False))


def demo(
    *,
    prompts_per_kind: int = 2,
    max_tokens: int = 64,
    temperature: float = 0.0,
    png: Path = Path("out/demo-experts.png"),
    engine: Annotated[EngineOptions | None, Parameter(name="*")] = None,
) -> int:
    """Build the demo model, generate code, English, German and maths together, and show which experts worked.

    The model is built once (half a minute) and kept in the user's cache: a small Mixture-of-Experts of 692 million
    parameters, 8 experts in each of its 30 layers, 2 of them at work on a token.

    Parameters
    ----------
    prompts_per_kind
        Prompts of each kind, 1 to 4.
    max_tokens
        Tokens per answer.
    temperature
        0 gives the same text every time.
    png
        Where the picture goes.
    """
    from rich.console import Console

    from trimtab.models.demo import DOMAIN_PROMPTS
    from trimtab.sampling_params import SamplingParams

    most = min(len(texts) for texts in DOMAIN_PROMPTS.values())
    if not 1 <= prompts_per_kind <= most:
        raise ValueError(f"prompts_per_kind ({prompts_per_kind}) must be in [1, {most}]; 2 is the default")
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    prompts = {kind: list(texts[:prompts_per_kind]) for kind, texts in DOMAIN_PROMPTS.items()}

    console = Console()
    # Cached prompt tokens would pass no expert and be missing from the picture.
    llm = open_llm(MODEL, EngineOptions(**{"enable_prefix_caching": False, **given(engine)}))
    answers, elapsed_s = answer_together(llm, prompts, params)
    show_answers(console, prompts, answers)
    show_speed(console, answers, elapsed_s)

    sequences = {
        kind: [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        for kind, outputs in answers.items()
    }
    counts = {TITLES.get(kind, kind): expert_use(llm, ids) for kind, ids in sequences.items()}
    show_experts(console, counts, png)
    return 0


def answer_together(
    llm: LLM, prompts: dict[str, list[str]], params: Any
) -> tuple[dict[str, list[RequestOutput]], float]:
    """All prompts of all kinds in one batch: outputs by kind, and the seconds it took."""
    batch = [llm.chat_prompt([{"role": "user", "content": text}]) for texts in prompts.values() for text in texts]
    start = time.perf_counter()
    outputs = llm.generate(batch, params, use_tqdm=stderr_is_terminal())
    elapsed_s = time.perf_counter() - start
    for output in outputs:
        if output.error is not None:
            raise ValueError(f"a demo prompt failed: {output.error}")
    remaining = iter(outputs)
    return {kind: [next(remaining) for _ in texts] for kind, texts in prompts.items()}, elapsed_s


def show_speed(console: Console, answers: dict[str, list[RequestOutput]], elapsed_s: float) -> None:
    outputs = [output for several in answers.values() for output in several]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_new_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    console.print(
        f"{len(outputs)} prompts together: {num_prompt_tokens} prompt tokens read and {num_new_tokens} tokens written "
        f"in {elapsed_s:.1f} s, [bold]{num_new_tokens / elapsed_s:.1f} tokens per second[/bold]\n",
        highlight=False,
    )


def show_experts(console: Console, counts: dict[str, np.ndarray], png: Path) -> None:
    from trimtab.cli.figure import save_figure
    from trimtab.cli.pictures import terminal_picture

    console.print(terminal_picture(counts, console))
    save_figure(counts, png, model="demo model")
    console.print(f"\nThe picture as PNG: {png}", highlight=False)
