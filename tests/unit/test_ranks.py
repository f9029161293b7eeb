"""What a rank is built from: it arrives whole in a worker process, and says how much of the machine is one rank's."""

from pathlib import Path

import pytest

from trimtab import assemble, ranks
from trimtab.assemble import RESERVE_BYTES, plan_kv_cache, plan_placement, rank_weight_bytes
from trimtab.config import EngineConfig
from trimtab.experts.data.dispatch.choice import DispatchPlan
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.routed_experts import routed_experts_layout
from trimtab.models.spec import ModelSpec, read_spec
from trimtab.plan import KVCacheConfig, KVCacheGroupSpec
from trimtab.ranks import RankSetup
from trimtab.runner.attention import kv_cache_bytes_per_token
from trimtab.testing.checkpoints import make_tiny_checkpoint

KV_CACHE = KVCacheConfig(16, 9, (KVCacheGroupSpec((0, 2), None, 64), KVCacheGroupSpec((1,), 8, 32)))


def make_setup(placement: Placement | None = None, **options) -> RankSetup:
    config = EngineConfig(model="m", **options)
    return RankSetup(config, Path("/models/m"), KV_CACHE, 128, placement, DispatchPlan("gloo", 2, 1, 64, 2, 32))


def two_ranks(**options) -> EngineConfig:
    return EngineConfig(**{"data_parallel_size": 2, "enable_expert_parallel": True, **options})


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> ModelSpec:
    """Mixtral with 8 experts in each of 2 layers."""
    return read_spec(make_tiny_checkpoint(tmp_path_factory.mktemp("m")))


@pytest.mark.parametrize("placement", [None, Placement(Topology(3, 1, 2), [[2, 0, 1, 1]], [[1, 1, 5, 1]])])
def test_setup_arrives_in_a_worker_as_it_was_sent(placement: Placement | None) -> None:
    setup = make_setup(
        placement, data_parallel_size=2, enable_expert_parallel=True, kv_cache_memory_bytes="1MiB", num_threads=3
    )
    assert RankSetup.decode(setup.encode()) == setup


def test_each_rank_gets_its_share_of_the_cores_unless_the_user_says_otherwise(monkeypatch) -> None:
    """B125."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cores, num_ranks, expected in ((8, 2, 4), (8, 3, 2), (2, 4, 1)):
        monkeypatch.setattr("trimtab.kernels.features.usable_cores", lambda cores=cores: cores)
        options = {"data_parallel_size": num_ranks, "enable_expert_parallel": True}
        assert make_setup(**options).num_threads == expected
        assert make_setup(num_threads=5, **options).num_threads == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert make_setup(data_parallel_size=2, enable_expert_parallel=True).num_threads == 7


def test_slots_must_divide_over_the_ranks(spec: ModelSpec) -> None:
    """The first thing to be checked once the model's experts are known."""
    with pytest.raises(ValueError, match=r"num_slots \(8 = 8 experts \+ 0 redundant\).*num_ranks \(3\); try"):
        plan_placement(two_ranks(data_parallel_size=3), spec)
    placement = plan_placement(two_ranks(data_parallel_size=2, tensor_parallel_size=2), spec)
    assert placement is not None and placement.topology.slots_per_rank == 2 and placement.num_layers == 2
    assert plan_placement(EngineConfig(enable_expert_parallel=True), spec) is None, "one rank holds each expert once"


def test_slots_are_checked_before_memory_and_backends(spec: ModelSpec, monkeypatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("asked before the slots were checked")

    for name in ("plan_dispatch", "plan_kv_cache", "start_ranks"):
        monkeypatch.setattr(assemble, name, refuse)
    with pytest.raises(ValueError, match="num_slots"):
        assemble.assemble(EngineConfig(model=str(spec.path), data_parallel_size=3, enable_expert_parallel=True))


def test_rank_holds_the_dense_weights_and_its_slots(spec: ModelSpec) -> None:
    one_expert = 3 * 64 * 96 * 4
    for num_ranks, slots in ((2, 4), (4, 2)):
        placement = plan_placement(two_ranks(data_parallel_size=num_ranks), spec)
        assert rank_weight_bytes(spec, placement) == spec.num_bytes - 2 * (8 - slots) * one_expert
    assert rank_weight_bytes(spec, None) == spec.num_bytes


def test_kv_cache_is_fitted_to_a_ranks_share_of_the_memory(spec: ModelSpec) -> None:
    weight_bytes = 2**20
    for config, available in ((EngineConfig(max_num_seqs=1), 2**30), (two_ranks(max_num_seqs=1), 2**31)):
        assert plan_kv_cache(config, spec, available, weight_bytes)[0].num_blocks == 17
    with pytest.raises(ValueError, match=r"not enough memory.*for each of 2 ranks.*free for each of 2 ranks"):
        plan_kv_cache(two_ranks(), spec, 2**30, weight_bytes)
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes \(1.00 GiB\) must be at most .* for each of 2 ranks"):
        plan_kv_cache(two_ranks(kv_cache_memory_bytes=2**30), spec, 3 * 2**30, weight_bytes)


def test_workers_share_is_what_its_process_gets(monkeypatch) -> None:
    seen = {}
    monkeypatch.setattr(ranks, "MultiprocessExecutor", lambda *args, **options: seen.update(options) or _Started())
    setup = make_setup(data_parallel_size=2, enable_expert_parallel=True, num_threads=3)
    started = ranks.start_ranks(setup, None, lambda stage, done, total: None)
    assert seen["environment"] == {"OMP_NUM_THREADS": "3"} and started.models == []


class _Started:
    def facts(self) -> list[dict[str, int]]:
        return [{}, {}]


def test_rows_of_routed_experts_are_planned_beside_the_kv_cache(spec: ModelSpec) -> None:
    """Both fit together in what the cache alone would get."""
    sizes = {}
    for capture in (False, True):
        config = EngineConfig(model=str(spec.path), block_size=16, enable_return_routed_experts=capture)
        kv_cache, _ = plan_kv_cache(config, spec, RESERVE_BYTES + spec.num_bytes + 2**23)
        block_bytes = 16 * kv_cache_bytes_per_token(spec.attention_layers, spec.dtype)
        sizes[capture] = kv_cache.num_blocks * block_bytes
        if capture:
            sizes[capture] += kv_cache.num_blocks * 16 * routed_experts_layout(spec.moe_layers).slot_bytes
    assert 0 <= sizes[False] - sizes[True] < sizes[False] / 50
