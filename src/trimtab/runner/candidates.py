"""The likeliest tokens of a row and the mass of all of them, without sorting the vocabulary.

Everything here is computed row by row: a row's result is bitwise the same whatever other rows are in the batch.
"""

# n rows  V vocabulary  C candidates

from __future__ import annotations

import torch

# How many candidates are looked at before looking at more; the whole vocabulary comes last.
CANDIDATE_STEPS = (64, 1024, 8192)
# Tokens whose largest logit is found together. torch finds a maximum at memory speed but its place ten times slower, so
# places are looked for among the blocks' maxima and then in the blocks that matter.
MAXIMA_BLOCK = 32
# Tokens whose masses are summed together before the row's sum: a draw then looks at the sums and at one block.
MASS_BLOCK = 256


def candidate_steps(vocab_size: int) -> list[int]:
    return [size for size in CANDIDATE_STEPS if size < vocab_size] + [vocab_size]


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each run of `MAXIMA_BLOCK` tokens [n, ceil(V / block)]; NaN where there is one."""
    vocab_size = logits.shape[1]
    whole = vocab_size // MAXIMA_BLOCK
    maxima = logits[:, : whole * MAXIMA_BLOCK].unflatten(1, (whole, MAXIMA_BLOCK)).amax(dim=-1)
    if whole * MAXIMA_BLOCK == vocab_size:
        return maxima
    return torch.cat([maxima, logits[:, whole * MAXIMA_BLOCK :].amax(dim=-1, keepdim=True)], dim=1)


def _tokens_of_blocks(logits: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [n, b * block] of the tokens of blocks [n, b]; -inf past the vocabulary's end."""
    vocab_size = logits.shape[1]
    ids = (blocks.unsqueeze(-1) * MAXIMA_BLOCK + torch.arange(MAXIMA_BLOCK, device=logits.device)).flatten(1)
    if vocab_size % MAXIMA_BLOCK == 0:
        return logits.gather(1, ids), ids
    outside = ids >= vocab_size
    ids = ids.clamp_max_(vocab_size - 1)
    return logits.gather(1, ids).masked_fill_(outside, float("-inf")), ids


def largest_tokens(logits: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit [n] and its token [n]: of equals the lowest id, in a row with a NaN the NaN."""
    peaks, block = maxima.max(dim=-1, keepdim=True)
    values, ids = _tokens_of_blocks(logits, block)
    return peaks[:, 0], ids.gather(1, values.argmax(dim=-1, keepdim=True))[:, 0]


def ordered_candidates(
    logits: torch.Tensor, maxima: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and token ids [n, C] of the largest logits, by falling value and, among equals, rising id.

    `torch.topk` breaks ties as it likes, so of the tokens that equal the last candidate any may be missing: callers
    trust only what lies strictly above it (or ask for the whole vocabulary). What lies strictly above the C-th
    largest logit is in at most C - 1 blocks, and these have the largest maxima.
    """
    if 2 * num_candidates * MAXIMA_BLOCK <= logits.shape[1]:
        blocks = torch.topk(maxima, num_candidates, dim=-1, sorted=False).indices
        tokens, token_ids = _tokens_of_blocks(logits, blocks)
        values, places = torch.topk(tokens, num_candidates, dim=-1, sorted=False)
        ids = token_ids.gather(1, places)
    else:
        values, ids = torch.topk(logits, num_candidates, dim=-1, sorted=False)
    ids, order = torch.sort(ids, dim=-1)
    values, order = torch.sort(values.gather(-1, order), dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def top_tokens(logits: torch.Tensor, maxima: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [n, num_tokens] of the largest logits: exact, ties by the lower id."""
    num_rows, vocab_size = logits.shape
    values = logits.new_empty(num_rows, num_tokens)
    ids = torch.empty(num_rows, num_tokens, dtype=torch.int64, device=logits.device)
    rows = torch.arange(num_rows, device=logits.device)
    for size in candidate_steps(vocab_size):
        if size <= num_tokens and size < vocab_size:
            continue
        found, found_ids = ordered_candidates(rows_of(logits, rows), rows_of(maxima, rows), size)
        values[rows], ids[rows] = found[:, :num_tokens], found_ids[:, :num_tokens]
        rows = rows[found[:, num_tokens - 1] <= found[:, -1]]
        if not len(rows):
            break
    return values, ids


def rows_of(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows of an ascending index; no copy when that is all of them."""
    return tensor if len(index) == len(tensor) else tensor.index_select(0, index)


class RowMass:
    """exp((logits - peak) / temperature) over the vocabulary, and its sums by blocks of tokens."""

    def __init__(self, logits: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor | float = 1.0) -> None:
        num_rows, self.vocab_size = logits.shape
        num_blocks = -(-self.vocab_size // MASS_BLOCK)
        weights = logits.new_empty(num_rows, num_blocks * MASS_BLOCK)
        inside = weights[:, : self.vocab_size]
        torch.sub(logits, peak, out=inside)
        inside.div_(temperature).exp_()
        weights[:, self.vocab_size :] = 0
        self.weights = weights.view(num_rows, num_blocks, MASS_BLOCK)
        # Two sums of fixed shape: torch splits a single long sum over threads by the shape of the whole batch.
        self.cumulative = self.weights.sum(dim=-1).double().cumsum(dim=-1)  # float64 [n, blocks]

    @property
    def total(self) -> torch.Tensor:
        return self.cumulative[:, -1:]

    def draw(self, uniform: torch.Tensor) -> torch.Tensor:
        """The token [n, 1] at the fraction `uniform` [n, 1] of the mass, tokens in the order of their ids."""
        target = uniform * self.total
        # The first block whose cumulative mass passes the target; never one without mass.
        last_block = (self.cumulative < self.total).sum(dim=-1, keepdim=True)
        block = torch.minimum((self.cumulative <= target).sum(dim=-1, keepdim=True), last_block)
        block = block.clamp_max_(self.cumulative.shape[1] - 1)
        before = torch.where(block > 0, self.cumulative.gather(1, (block - 1).clamp_min(0)), 0.0)
        masses = self.weights[torch.arange(len(block), device=block.device), block[:, 0]].double()
        cumulative = masses.cumsum(dim=-1)
        # Rounding may put the target past the block's end: then its last token with mass.
        last = (masses > 0).long().mul_(torch.arange(MASS_BLOCK, device=block.device)).amax(dim=-1, keepdim=True)
        within = torch.minimum((cumulative <= target - before).sum(dim=-1, keepdim=True), last)
        return block * MASS_BLOCK + within
