"""What storing experts in int8 costs in quality: perplexity of the demo model against the same model in bfloat16.

    python benchmarks/int8_quality.py --length 500 --passages 6 --json int8.json

Three sets of text: the passages that shaped the demo's routers (trimtab/models/demo/texts); held-out ones, source code
and topics of the manual from Python's standard library; and answers to the demo's chat prompts that the bfloat16 model
samples, with a seed. The last set is judged by its own author, and any other model must find it less likely: an upper
bound. Both sides read the same tokens by the engine's own prompt log-probabilities. Prints nats per token of each set
and domain, the ratio of perplexities, and the standard error of a passage's difference: how much of it is chance.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import json
import math
import statistics
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

from transformers import AutoTokenizer

from trimtab import LLM, SamplingParams
from trimtab.kernels.features import default_num_threads
from trimtab.models.demo import DOMAIN_PROMPTS, calibration_texts, ensure_demo

Passages = dict[str, list[list[int]]]  # by domain


def calibration_passages(path: Path, length: int, count: int) -> Passages:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return {
        domain: [tokenizer.encode(text)[:length] for text in texts[:count]]
        for domain, texts in calibration_texts().items()
    }


def standard_library_passages(path: Path, length: int, count: int) -> Passages:
    tokenizer = AutoTokenizer.from_pretrained(path)
    sources = [inspect.getsource(module) for module in (argparse, heapq, statistics, textwrap, json, inspect)]
    texts = {
        "code": sources,
        "english": [topics[name] for name in ("import", "class", "objects", "with", "try", "for")],
    }
    return {
        domain: [tokenizer.encode(text[:8000])[:length] for text in found[:count]] for domain, found in texts.items()
    }


def sampled_passages(llm: LLM, length: int, seed: int) -> Passages:
    params = SamplingParams(temperature=0.8, seed=seed, max_tokens=min(length, 200))
    asked = [(domain, prompt) for domain, prompts in DOMAIN_PROMPTS.items() for prompt in prompts]
    outputs = llm.chat([[{"role": "user", "content": prompt}] for _, prompt in asked], params, use_tqdm=False)
    passages: Passages = {domain: [] for domain in DOMAIN_PROMPTS}
    for (domain, _), output in zip(asked, outputs, strict=True):
        passages[domain].append([*output.prompt_token_ids, *output.outputs[0].token_ids])
    return passages


def nats_per_passage(llm: LLM, passages: list[list[int]]) -> list[tuple[float, int]]:
    """(sum of negative log-likelihoods, number of predicted tokens) of each."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for output, passage in zip(llm.generate(passages, params, use_tqdm=False), passages, strict=True):
        assert output.error is None, output.error
        entries = zip(passage[1:], output.prompt_logprobs[1:], strict=True)
        found.append((-sum(entry[token].logprob for token, entry in entries), len(passage) - 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=500, help="longest passage, in tokens")
    parser.add_argument("--passages", type=int, default=6, help="of each text and domain, at most 6")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled texts")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()

    path = ensure_demo()
    options = {
        "dtype": "bfloat16",
        "max_model_len": arguments.length + 300,
        "num_threads": arguments.threads,
        "enable_prefix_caching": False,
    }
    with LLM(str(path), **options) as llm:
        sets = {
            "calibration": calibration_passages(path, arguments.length, arguments.passages),
            "standard library": standard_library_passages(path, arguments.length, arguments.passages),
            f"sampled, seed {arguments.seed}": sampled_passages(llm, arguments.length, arguments.seed),
        }
        plain = {(name, domain): nats_per_passage(llm, p) for name, by in sets.items() for domain, p in by.items()}
    with LLM(str(path), quantization="int8", **options) as llm:
        int8 = {(name, domain): nats_per_passage(llm, p) for name, by in sets.items() for domain, p in by.items()}

    report = []
    print(f"{'texts':<22}{'domain':<10}{'tokens':>8}{'bfloat16':>10}{'int8':>9}{'perplexity':>12}{'by chance':>11}")
    for name in sets:
        for domain in (*sets[name], "all"):
            keys = [key for key in plain if key[0] == name and domain in (key[1], "all")]
            pairs = [pair for key in keys for pair in zip(plain[key], int8[key], strict=True)]
            tokens = sum(count for (_, count), _ in pairs)
            ours, theirs = (sum(pair[side][0] for pair in pairs) / tokens for side in (1, 0))
            ratio = math.exp(ours - theirs)
            differences = [(other - one) / count for (one, count), (other, _) in pairs]
            chance = statistics.stdev(differences) / len(differences) ** 0.5
            print(f"{name:<22}{domain:<10}{tokens:>8}{theirs:>10.4f}{ours:>9.4f}{ratio - 1:>+12.2%}{chance:>11.2%}")
            report.append({"texts": name, "domain": domain, "tokens": tokens, "bfloat16": theirs, "int8": ours,
                           "perplexity_ratio": ratio, "standard_error": chance})  # fmt: skip
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
