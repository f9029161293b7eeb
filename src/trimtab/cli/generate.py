"""`trimtab generate`: prompts in, text or JSON lines out; a bad prompt fails alone."""

from __future__ import annotations

import atexit
import json
import sys
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trimtab.cli.options import EngineOptions, SamplingOptions, engine_config, sampling_params
from trimtab.cli.prompts import PromptLine, as_chat, read_prompts
from trimtab.observability.progress import stderr_is_terminal

if TYPE_CHECKING:
    from trimtab.config import EngineConfig
    from trimtab.llm import LLM
    from trimtab.outputs import RequestOutput
    from trimtab.sampling_params import SamplingParams


def open_llm(model: str, options: EngineOptions | None) -> LLM:
    """Checks the options, then loads the model."""
    config = engine_config(model, options)
    from trimtab import LLM

    given = {name: value for name, value in vars(config).items() if name != "model"}
    llm = LLM(model=config.model, **given)
    atexit.register(_shut_down, weakref.ref(llm))  # also after Ctrl-C: experts that move come to rest
    return llm


def _shut_down(reference: weakref.ref[LLM]) -> None:
    if (llm := reference()) is not None:
        llm.shutdown()


def engine_prompt(llm: LLM, prompt: PromptLine) -> Any:
    """What `LLM.generate` takes. Raises `ValueError` when the chat template refuses the messages."""
    if prompt.messages is not None:
        return llm.chat_prompt(prompt.messages)
    return prompt.text if prompt.token_ids is None else {"prompt_token_ids": prompt.token_ids}


def run_prompts(llm: LLM, prompts: list[PromptLine], params: SamplingParams) -> list[RequestOutput | str]:
    """One entry per prompt, in order: its output, or why it never reached the engine."""
    results: list[RequestOutput | str] = [prompt.error or "" for prompt in prompts]
    ready: dict[int, Any] = {}
    for position, prompt in enumerate(prompts):
        if prompt.error is None:
            try:
                ready[position] = engine_prompt(llm, prompt)
            except ValueError as error:
                results[position] = str(error)
    if ready:
        outputs = llm.generate(list(ready.values()), params, use_tqdm=stderr_is_terminal())
        for position, output in zip(ready, outputs, strict=True):
            results[position] = output
    return results


def check_routes_path(path: Path, config: EngineConfig) -> None:
    """Raises what would otherwise be found out after all prompts have run."""
    if not config.enable_return_routed_experts:
        raise ValueError("--return-routed-experts needs an engine that stores them; add --enable-return-routed-experts")
    if path.is_dir():
        raise ValueError(f"--return-routed-experts ({path}) is a folder; name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)


def as_json(index: int, prompt: PromptLine, result: RequestOutput | str) -> dict[str, Any]:
    """One JSON line. `error` is null where all went well."""
    if isinstance(result, str):
        return {"index": index, "prompt": prompt.text, "outputs": [], "error": result}
    completions = []
    for completion in result.outputs:
        record = {
            "index": completion.index,
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            record["cumulative_logprob"] = completion.cumulative_logprob
            record["logprobs"] = _logprobs(completion.logprobs)
        completions.append(record)
    line = {
        "index": index,
        "request_id": result.request_id,
        "prompt": prompt.text if prompt.text is not None else result.prompt,
        "num_prompt_tokens": len(result.prompt_token_ids or []),
        "num_cached_tokens": result.num_cached_tokens,
        "outputs": completions,
        "error": result.error,
        "metrics": asdict(result.metrics),
    }
    if prompt.messages is not None:
        line["messages"] = prompt.messages
    if result.prompt_logprobs is not None:
        line["prompt_logprobs"] = _logprobs(result.prompt_logprobs)
    return line


def _logprobs(positions: list[Any]) -> list[Any]:
    return [
        None if choices is None else {str(token): choice._asdict() for token, choice in choices.items()}
        for choices in positions
    ]


def print_text(prompts: list[PromptLine], results: list[RequestOutput | str]) -> None:
    """Each prompt's completions; headed by the prompt when there is more than one text."""
    headed = len(prompts) > 1
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        error = result if isinstance(result, str) else result.error
        if error:
            sys.stdout.flush()
            print(f"error: prompt {index} ({prompt.label}): {error}", file=sys.stderr)
            continue
        assert not isinstance(result, str)
        if headed:
            print(f"[{index}] {prompt.label}")
        for completion in result.outputs:
            if len(result.outputs) > 1:
                print(f"({completion.index})")
            print(completion.text)
        if headed:
            print()


def generate(
    file: Path | None = None,
    /,
    *,
    model: str = "demo",
    prompt: Annotated[list[str] | None, Parameter(allow_leading_hyphen=True)] = None,
    chat: Annotated[bool, Parameter(negative="")] = False,
    system: str | None = None,
    json_lines: Annotated[bool, Parameter(name="--json", negative="")] = False,
    return_routed_experts: Path | None = None,
    sampling: Annotated[SamplingOptions | None, Parameter(name="*")] = None,
    engine: Annotated[EngineOptions | None, Parameter(name="*")] = None,
) -> int:
    """Complete prompts from arguments, a file or stdin; all of them run together.

    Sampling settings that are not typed come from the checkpoint's generation_config.json, then from the defaults.

    Exit code: 0 when every prompt was answered, 1 when some failed (each says why), 2 when nothing could run.

    Parameters
    ----------
    file
        One prompt per line, or JSON lines with "prompt", "messages" or "prompt_token_ids"; - is stdin.
    model
        A folder with a Hugging Face MoE checkpoint, or demo.
    prompt
        A prompt; repeat for more.
    chat
        Put each prompt into the model's chat template, as the user's turn.
    system
        The system message, with --chat.
    json_lines
        Print one JSON object per prompt, with token ids, finish reasons and times.
    return_routed_experts
        Write the experts that each token used, and the sampled tokens' log-probabilities, to this safetensors file for
        trainers (see trimtab routes and trimtab replay); needs --enable-return-routed-experts.
    """
    if system and not chat:
        raise ValueError("--system needs --chat; add it, or write the instruction into the prompt")
    prompts = read_prompts(prompt, file)
    if chat:
        prompts = [as_chat(line, system) for line in prompts]
    # What is impossible should not wait for the model.
    sampling_params(sampling)
    if return_routed_experts is not None:
        check_routes_path(return_routed_experts, engine_config(model, engine))
    llm = open_llm(model, engine)
    params = sampling_params(sampling, llm.get_default_sampling_params())
    if return_routed_experts is not None and params.logprobs is None:
        params = replace(params, logprobs=0)  # a trainer compares them with its own
    results = run_prompts(llm, prompts, params)
    if json_lines:
        for index, (line, result) in enumerate(zip(prompts, results, strict=True)):
            print(json.dumps(as_json(index, line, result), ensure_ascii=False), flush=True)
    else:
        print_text(prompts, results)
    answered = [result for result in results if not isinstance(result, str) and not result.error]
    if return_routed_experts is not None:
        if answered:
            llm.save_routed_experts(return_routed_experts, answered)
            print(
                f"routed experts: {return_routed_experts} (trimtab routes FILE shows them, trimtab replay MODEL FILE "
                "compares a trainer's)",
                file=sys.stderr,
            )
        else:
            print(f"error: no prompt was answered; {return_routed_experts} was not written", file=sys.stderr)
    return 0 if len(answered) == len(results) else 1
