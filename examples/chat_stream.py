"""Print a chat answer word by word, while it is being written.

python examples/chat_stream.py [MODEL]
"""

import sys

from trimtab import LLM, SamplingParams


def main(model: str = "demo") -> None:
    llm = LLM(model=model)
    messages = [
        {"role": "system", "content": "You are a helpful assistant. Answer in one or two sentences."},
        {"role": "user", "content": "What is the capital of France, and which river runs through it?"},
    ]
    shown = ""
    for output in llm.stream_chat(messages, SamplingParams(temperature=0, max_tokens=64)):
        # Each output holds the whole text so far, so the news is what was not printed yet.
        text = output.outputs[0].text
        print(text[len(shown) :], end="", flush=True)
        shown = text
    metrics = output.metrics
    print(f"\n\nfirst token after {metrics.first_token_s - metrics.arrival_s:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
