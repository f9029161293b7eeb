"""Ask several questions about one text: it is read once, later questions find its KV cache.

python examples/prefix_caching.py [MODEL]
"""

import sys
import time

from trimtab import LLM, SamplingParams

TEXT = (
    "The harbour of Lunden has three piers. The north pier belongs to the fishing boats, which leave before dawn and "
    "come back at noon. The middle pier is for ferries to the islands. The south pier has been closed since the storm. "
) * 4
QUESTIONS = ("Which pier is closed?", "When do the fishing boats come back?", "Where do the ferries go?")


def main(model: str = "demo") -> None:
    llm = LLM(model=model, enable_prefix_caching=True)
    params = SamplingParams(temperature=0, max_tokens=12)
    for question in QUESTIONS:
        start = time.perf_counter()
        output = llm.generate(f"{TEXT}\n\nQuestion: {question}\nAnswer:", params, use_tqdm=False)[0]
        elapsed_s = time.perf_counter() - start
        total, cached = len(output.prompt_token_ids), output.num_cached_tokens
        print(f"{elapsed_s:6.2f} s  {cached:4} of {total} prompt tokens from the cache  {output.outputs[0].text!r}")
    print(f"hit rate: {llm.stats()['prefix_cache']['hit_rate']:.0%} of all prompt tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
