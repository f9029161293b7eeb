"""Count which experts two kinds of text are routed to, and say how far they differ.

python examples/expert_usage.py [MODEL]
"""

import sys

from trimtab import LLM, SamplingParams

TEXTS = {
    "English": "The lighthouse keeper climbed the stairs and lit the lamp before the storm came in from the sea.",
    "code": "for i in range(10):\n    if i % 2 == 0:\n        print(i ** 2)\n    else:\n        total += i",
}


def main(model: str = "demo") -> None:
    # A cached prompt passes no expert; off, so that every token is counted.
    llm = LLM(model=model, enable_prefix_caching=False)
    counts = {}
    for kind, text in TEXTS.items():
        with llm.expert_usage() as usage:
            llm.generate(text, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        counts[kind] = usage.counts  # [MoE layers, experts], tokens routed

    for layer in range(len(counts["code"])):
        rows = "   ".join(f"{kind} {table[layer].tolist()}" for kind, table in counts.items())
        print(f"MoE layer {layer:2}: {rows}")

    shares = [table / table.sum(dim=1, keepdim=True) for table in counts.values()]
    moved = (shares[0] - shares[1]).abs().sum(dim=1).mean().item() / 2
    print(f"\n{moved:.0%} of the tokens go to other experts when the text changes from English to code.")


if __name__ == "__main__":
    main(*sys.argv[1:])
