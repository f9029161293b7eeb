"""Serve one kind of text on two ranks, let its experts be spread evenly while requests run, and compare the tokens.

python examples/rebalance_live.py [MODEL]
"""

import sys

from trimtab import LLM, SamplingParams

CODE = "for i in range(10):\n    if i % {} == 0:\n        print(i ** 2)\n    else:\n        total += i"
EPLB = {"window_size": 64, "step_interval": 10_000, "num_redundant_experts": 2, "min_gain": 0}


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate([CODE.format(number) for number in range(2, 10)], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(model: str = "demo") -> None:
    with LLM(
        model=model,
        data_parallel_size=2,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config=EPLB,
        enable_prefix_caching=False,  # a cached prompt passes no expert and counts as no load
        max_model_len=512,
    ) as llm:
        before = answers(llm)

        # Every `step_interval` steps this happens by itself; experts then move between the steps of running requests.
        stats = llm.rearrange_experts()
        decision = stats["last_decision"]
        print(f"{stats['moves']} slots hold another expert now, {stats['bytes'] / 2**20:.1f} MiB went between ranks")
        print(f"balancedness before {decision['balancedness']:.2f}, expected {decision['predicted_balancedness']:.2f}")

        after = answers(llm)
        measured = llm.rearrange_experts()["last_decision"]["balancedness"]
        print(f"balancedness after  {measured:.2f} (1 is even: every rank computes as much as the others)")
        same = sum(first == second for first, second in zip(before, after, strict=True))
        print(f"{same} of {len(before)} answers are the same, token by token")


if __name__ == "__main__":
    main(*sys.argv[1:])
