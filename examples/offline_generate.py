"""Complete several prompts in one batch, each with its own sampling parameters.

python examples/offline_generate.py [MODEL]
"""

import sys

from trimtab import LLM, SamplingParams


def main(model: str = "demo") -> None:
    llm = LLM(model=model)
    prompts = ["The capital of France is", "def fibonacci(n):", "Der Wald ist im Herbst"]
    params = [
        SamplingParams(temperature=0, max_tokens=16),  # greedy: the same text every time
        SamplingParams(temperature=0, max_tokens=32, stop=["\n\n"]),
        SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=7),  # sampled, yet repeatable
    ]
    for output in llm.generate(prompts, params):
        if output.error is not None:  # one bad prompt does not stop the others
            print(f"{output.prompt!r} failed: {output.error}")
            continue
        completion = output.outputs[0]
        print(f"{output.prompt}{completion.text}")
        print(f"    {len(completion.token_ids)} tokens, ended by {completion.finish_reason}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
