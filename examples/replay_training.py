"""Sample a rollout, then train one step with its routing replayed: the trainer uses the experts that the rollout used.

python examples/replay_training.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from trimtab import LLM, SamplingParams
from trimtab.models.resolve import resolve_model
from trimtab.replay import RoutesFile, replay_routed_experts, report_replay

PROMPTS = ["The lighthouse keeper climbed the stairs and", "A rudder is a small thing, and yet"]


def roll_out(model: str, file: Path) -> None:
    """Samples at temperature 1, with the sampled tokens' log-probabilities, and writes who was routed where."""
    with LLM(model=model, enable_return_routed_experts=True, enable_prefix_caching=True) as llm:
        params = SamplingParams(temperature=1.0, max_tokens=24, logprobs=0, seed=1)
        llm.save_routed_experts(file, llm.generate(PROMPTS, params, use_tqdm=False))


def train_one_step(trainer: torch.nn.Module, file: RoutesFile) -> None:
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.001)
    for routes, advantage in zip(file, (1.0, -1.0), strict=True):
        tokens = torch.from_numpy(routes.token_ids)
        with replay_routed_experts(trainer, routes):
            logits = trainer(input_ids=tokens[None, :-1], use_cache=False).logits[0]
            sampled = slice(routes.num_prompt_tokens - 1, None)
            logprobs = logits[sampled].log_softmax(-1).gather(1, tokens[1:][sampled, None])
            (-advantage * logprobs.mean()).backward()
    for part, names in {"routers": (".gate.", ".router."), "experts": (".experts.",)}.items():
        weights = [weight for name, weight in trainer.named_parameters() if any(part in name for part in names)]
        norms = [weight.grad.norm() for weight in weights if weight.grad is not None]
        print(f"gradient norm of the {part}: {torch.stack(norms).norm():.3g}")
    optimizer.step()


def main(model: str = "demo") -> None:
    with tempfile.TemporaryDirectory() as folder:
        roll_out(model, Path(folder) / "routes.safetensors")
        file = RoutesFile(Path(folder) / "routes.safetensors")
        trainer = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=torch.float32)
        train_one_step(trainer, file)
        report = report_replay(trainer, file)  # the weights are one step ahead of the rollout's now
    for name, run in (("without replay", report.without), ("with replay", report.with_replay)):
        print(f"{name:<15} {run.row_mismatch:7.2%} of rows use other experts, KL (k3) {run.kl_k3:.2g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
