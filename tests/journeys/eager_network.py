"""transformers' own network as the judge of outputs: eager, fp32, no cache, every sequence alone and whole."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from trimtab.outputs import Logprob, RequestOutput

TOLERANCE = 2e-4  # of log-probabilities: fp32 sums in another order


class EagerNetwork:
    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.path = path
        self.network = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, V]: row t says what follows token t."""
        return self.network(torch.tensor([token_ids]), use_cache=False).logits[0].float()

    def judge(self, output: RequestOutput, *, greedy: bool = True, tolerance: float = TOLERANCE) -> None:
        """Every log-probability and rank of the output is the network's own; greedy tokens are likeliest ones."""
        assert output.error is None, output.error
        prompt = output.prompt_token_ids
        for completion in output.outputs:
            logprobs = self.logits(prompt + completion.token_ids).log_softmax(dim=-1)
            assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
            for offset, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                row = logprobs[len(prompt) - 1 + offset]
                check_entry(entry, row, token, tolerance)
                assert not greedy or row[token] >= row.max() - tolerance, f"token {offset} is not the likeliest"
            total = sum(entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs))  # noqa: B905
            assert abs(completion.cumulative_logprob - total) < 1e-4
        if output.prompt_logprobs is not None:
            logprobs = self.logits(prompt).log_softmax(dim=-1)
            assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
            for position in range(1, len(prompt)):
                check_entry(output.prompt_logprobs[position], logprobs[position - 1], prompt[position], tolerance)


def check_entry(entry: dict[int, Logprob], row: torch.Tensor, token: int, tolerance: float) -> None:
    """`entry` names `token` and the likeliest ones of `row` [V] with their log-probabilities and ranks."""
    for token_id, logprob in entry.items():
        assert abs(logprob.logprob - float(row[token_id])) < tolerance
        ahead, near = int((row > row[token_id] + tolerance).sum()), int((row >= row[token_id] - tolerance).sum())
        assert ahead + 1 <= logprob.rank <= near
    assert next(iter(entry)) == token, "the token that stands there comes first"
