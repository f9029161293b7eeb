"""A step plan as tensors: what the vectorised gather makes equals the plan, spelled out token by token."""

import random

import numpy as np
import pytest
import torch

from trimtab.plan import KVCacheConfig, KVCacheGroupSpec, OpenRow, ScheduledRow, StepPlan
from trimtab.runner.request_table import RequestTable
from trimtab.runner.step_inputs import StepInputs, gather_inputs
from trimtab.sampling_params import SamplingParams

CPU = torch.device("cpu")


def kv_cache(block_size: int) -> KVCacheConfig:
    groups = tuple(
        KVCacheGroupSpec(layer_ids=(index,), window=window, bytes_per_token=8) for index, window in enumerate((None, 8))
    )
    return KVCacheConfig(block_size, 1000, groups)


def open_row(table: RequestTable, row: int, tokens: list[int], num_prompt_tokens: int, **sampling: int) -> OpenRow:
    opened = OpenRow(row, str(row), tokens, num_prompt_tokens, SamplingParams(**sampling), seed=0, stop_token_ids=[])
    table.open(opened)
    return opened


def random_step(
    seed: int, block_size: int
) -> tuple[RequestTable, StepPlan, dict[int, OpenRow], dict[int, list[list[int]]]]:
    """Rows in no order, some of them at chunk ends, some decoding, some that want prompt log-probabilities."""
    rng = random.Random(seed)
    table = RequestTable(9, 60, kv_cache(block_size), CPU)
    plan, opened, blocks = StepPlan(0), {}, {}
    for row in rng.sample(range(9), 6):
        num_prompt_tokens = rng.randint(1, 30)
        tokens = [rng.randrange(500) for _ in range(num_prompt_tokens + rng.randint(0, 20))]
        wanted = {"prompt_logprobs": 1} if rng.random() < 0.5 else {}
        opened[row] = open_row(table, row, tokens, num_prompt_tokens, **wanted)
        start = rng.randrange(len(tokens))
        num_tokens = rng.randint(1, len(tokens) - start)
        count = -(-(start + num_tokens) // block_size)
        blocks[row] = [rng.sample(range(1, 1000), count) for _ in range(2)]
        cut = rng.randint(0, count)  # blocks come in two plans
        table.append_blocks(ScheduledRow(row, 0, 0, False, tuple(group[:cut] for group in blocks[row])))
        samples = start + num_tokens == len(tokens)
        plan.scheduled.append(
            ScheduledRow(row, start, num_tokens, samples, tuple(group[cut:] for group in blocks[row]))
        )
        table.append_blocks(plan.scheduled[-1])
    return table, plan, opened, blocks


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_gather_equals_the_plan_spelled_out(block_size: int) -> None:
    for seed in range(20):
        print(f"seed {seed}")
        table, plan, opened, blocks = random_step(seed, block_size)
        inputs = gather_inputs(plan, table, kv_cache(block_size))
        expected_tokens, expected_positions, slots = [], [], ([], [])
        last_tokens, prompt = [], []
        for part in plan.scheduled:
            row = opened[part.row]
            for position in range(part.start, part.start + part.num_tokens):
                if row.sampling.prompt_logprobs is not None and position + 1 < row.num_prompt_tokens:
                    prompt.append((len(expected_tokens), part.row, row.token_ids[position + 1]))
                expected_tokens.append(row.token_ids[position])
                expected_positions.append(position)
                for group in range(2):
                    block = blocks[part.row][group][position // block_size]
                    slots[group].append(block * block_size + position % block_size)
            if part.samples:
                last_tokens.append((len(expected_tokens) - 1, part.row, part.start + part.num_tokens))
        assert inputs.token_ids.tolist() == expected_tokens
        assert inputs.positions.tolist() == expected_positions
        assert inputs.logits_rows.tolist() == [index for index, _, _ in last_tokens + prompt]
        assert inputs.sampled_rows.tolist() == [row for _, row, _ in last_tokens]
        assert inputs.sampled_positions.tolist() == [position for _, _, position in last_tokens]
        assert prompt_of(inputs) == [(row, token) for _, row, token in prompt]
        for group in range(2):
            check_metadata(inputs, plan, group, slots[group], [blocks[part.row][group] for part in plan.scheduled])


def prompt_of(inputs: StepInputs) -> list[tuple[int, int]]:
    if inputs.prompt is None:
        return []
    return list(zip(inputs.prompt.rows.tolist(), inputs.prompt.next_token_ids.tolist(), strict=True))


def check_metadata(inputs: StepInputs, plan: StepPlan, group: int, slots: list[int], tables: list[list[int]]) -> None:
    metadata = inputs.attention[group]
    seq_lens = [part.start + part.num_tokens for part in plan.scheduled]
    query_start = np.cumsum([0] + [part.num_tokens for part in plan.scheduled]).tolist()
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.seq_lens.tolist() == metadata.seq_lens_host.tolist() == seq_lens
    assert metadata.query_start.tolist() == metadata.query_start_host.tolist() == query_start
    for row, table in enumerate(tables):
        assert metadata.block_table[row].tolist()[: len(table)] == table


def test_a_written_token_is_found_by_the_next_gather_and_by_no_other_row() -> None:
    table = RequestTable(3, 8, kv_cache(4), CPU)
    for row in (2, 0):
        open_row(table, row, [10 + row, 20 + row], 2)
        table.append_blocks(ScheduledRow(row, 0, 2, True, ([1 + row], [4 + row])))
    table.write_tokens(np.array([0, 2]), np.array([2, 2]), torch.tensor([70, 72]))
    plan = StepPlan(1, scheduled=[ScheduledRow(row, 2, 1, True, ([], [])) for row in (2, 0)])
    assert gather_inputs(plan, table, kv_cache(4)).token_ids.tolist() == [72, 70]


def test_a_row_is_free_again_after_its_close_and_starts_with_no_blocks() -> None:
    table = RequestTable(1, 8, kv_cache(4), CPU)
    open_row(table, 0, [1, 2, 3, 4, 5], 5)
    table.append_blocks(ScheduledRow(0, 0, 5, True, ([7, 8], [9, 6])))
    with pytest.raises(AssertionError, match="row 0 is opened twice"):
        open_row(table, 0, [1], 1)
    table.close(0)
    open_row(table, 0, [6, 7], 2)
    table.append_blocks(ScheduledRow(0, 0, 2, True, ([3], [2])))
    plan = StepPlan(1, scheduled=[ScheduledRow(0, 0, 2, True, ([], []))])
    inputs = gather_inputs(plan, table, kv_cache(4))
    assert inputs.token_ids.tolist() == [6, 7]
    assert [inputs.attention[group].slot_mapping.tolist() for group in range(2)] == [[12, 13], [8, 9]]


def test_the_longest_request_has_room_for_the_token_nobody_forwards() -> None:
    table = RequestTable(1, 4, kv_cache(4), CPU)
    open_row(table, 0, [1, 2, 3, 4], 4)
    table.write_tokens(np.array([0]), np.array([4]), torch.tensor([9]))
    assert table.token_ids[0].tolist() == [1, 2, 3, 4, 9]
    table.close(0)
    with pytest.raises(AssertionError, match="longer than the model"):
        open_row(table, 0, [1] * 5, 5)
