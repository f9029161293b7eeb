"""Builds the ranks of an engine: in this thread, in threads of this process, or in processes of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from trimtab.config import EngineConfig, config_from_options
from trimtab.engine.executor.codec import decode_setup, encode_setup
from trimtab.engine.executor.inline import InlineExecutor
from trimtab.engine.executor.multiprocess import MAX_STEP_S, MultiprocessExecutor
from trimtab.engine.executor.threads import ThreadsExecutor
from trimtab.engine.executor.worker import Worker
from trimtab.engine.executor.worker_processes import private_folder
from trimtab.experts.data.dispatch.base import Dispatcher
from trimtab.experts.data.dispatch.choice import (
    DispatchPlan,
    choose_dispatcher,
    create_resources,
    open_dispatcher,
)
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.routed_experts import routed_experts_layout
from trimtab.kernels.features import default_num_threads, usable_cores
from trimtab.models.language_model import LanguageModel
from trimtab.models.loading import load_model
from trimtab.models.refit import check_weights, refit
from trimtab.models.spec import ModelSpec, read_spec
from trimtab.observability.progress import Progress, no_progress
from trimtab.plan import Executor, KVCacheConfig
from trimtab.runner.balancing import NoRankBalancer, RankBalancer
from trimtab.runner.model_runner import ModelRunner
from trimtab.runner.reference_runner import ReferenceRunner

if TYPE_CHECKING:
    from trimtab.experts.data.capturer import RoutedExpertsCapturer
    from trimtab.experts.movement.choice import MovementPlan
    from trimtab.experts.movement.communicator.base import Communicator

logger = logging.getLogger(__name__)

RUNNERS = {"v2": ModelRunner, "v1": ReferenceRunner}
WORKER = "trimtab.worker"


@dataclass(frozen=True, slots=True)
class RankSetup:
    """All that a rank is built from, and the same for every rank. `placement` None: one rank, slot e is expert e."""

    config: EngineConfig
    path: Path  # the checkpoint's
    kv_cache: KVCacheConfig
    max_model_len: int
    placement: Placement | None
    dispatch: DispatchPlan
    movement: MovementPlan | None = None  # None: experts stay where they are

    @property
    def num_threads(self) -> int:
        return self.config.num_threads or default_num_threads(num_processes=self.config.num_ranks)

    def encode(self) -> bytes:
        placement = None
        if self.placement is not None:
            placement = {
                "topology": asdict(self.placement.topology),
                "slot_to_expert": self.placement.slot_to_expert,
                "shares": self.placement.shares,
            }
        return encode_setup(
            {
                "options": {name: getattr(self.config, name) for name in self.config.__dataclass_fields__},
                "path": str(self.path),
                "kv_cache": self.kv_cache,
                "max_model_len": self.max_model_len,
                "placement": placement,
                "dispatch": self.dispatch,
                "movement": self.movement,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> RankSetup:
        fields = decode_setup(data)
        placement = None
        if (found := fields["placement"]) is not None:
            placement = Placement(Topology(**found["topology"]), found["slot_to_expert"], found["shares"])
        return cls(
            config_from_options(fields["options"]),
            Path(fields["path"]),
            msgspec.convert(fields["kv_cache"], KVCacheConfig),
            fields["max_model_len"],
            placement,
            msgspec.convert(fields["dispatch"], DispatchPlan),
            _movement_plan(fields["movement"]),
        )


@dataclass(slots=True)
class Ranks:
    """Ranks that are ready. `models` are those of this process, indexed by rank; none where ranks are processes."""

    executor: Executor
    facts: list[dict[str, int]]  # per rank: bytes_read, kv_cache_bytes, num_threads
    models: list[LanguageModel] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)  # likewise


def plan_dispatch(config: EngineConfig, spec: ModelSpec) -> DispatchPlan:
    """How tokens reach their experts; raises `ValueError` where `all2all_backend` cannot serve."""
    return choose_dispatcher(
        num_ranks=config.num_ranks,
        num_sharing=config.tensor_parallel_size,
        max_tokens=config.max_num_batched_tokens,
        max_top_k=max((layer.top_k for layer in spec.moe_layers), default=0),
        max_hidden_size=max((layer.shape.hidden_size for layer in spec.moe_layers), default=0),
        backend=config.all2all_backend,
        num_cores=usable_cores(),
        timeout_s=MAX_STEP_S,
    )


def build_rank(setup: RankSetup, spec: ModelSpec, rank: int, progress: Progress) -> tuple[Worker, LanguageModel]:
    """One rank's worker. Collective for some dispatchers: every rank, at the same time."""
    torch.set_num_threads(setup.num_threads)
    bytes_read = 0

    def report(done: int, total: int) -> None:
        nonlocal bytes_read
        bytes_read = done
        progress("load", done, total)

    with ExitStack() as opened:
        dispatcher = open_dispatcher(setup.dispatch, rank)
        opened.callback(dispatcher.close)
        # Before the load: a rank that fails to load closes it, and the others do not wait for it.
        communicator = _open_communicator(setup.movement, rank)
        if communicator is not None:
            opened.callback(communicator.close)
        model = load_model(
            spec,
            progress=report,
            placement=setup.placement,
            rank=rank,
            token_group=rank // setup.config.tensor_parallel_size,
            dispatcher=dispatcher,
        )
        balancer = _build_balancer(setup, model, dispatcher, communicator, rank, opened)
        capturer = _bind_capturer(setup, spec, model) if setup.config.enable_return_routed_experts else None
        runner = RUNNERS[setup.config.model_runner](
            model,
            setup.kv_cache,
            max_num_seqs=setup.config.max_num_seqs,
            max_model_len=setup.max_model_len,
            balancer=balancer,
            capturer=capturer,
        )
        facts = {"bytes_read": bytes_read, "kv_cache_bytes": runner.kv_cache_bytes, "num_threads": setup.num_threads}
        if capturer is not None:
            facts["routed_experts_bytes"] = capturer.buffer.nbytes
        return Worker(runner, facts, opened.pop_all().close, dispatcher.abort), model


class RankWeights:
    """New weights for a rank's model. `agree` follows them: with the other ranks, on what they hold now."""

    def __init__(self, model: LanguageModel, rank: int) -> None:
        self.model = model
        self.rank = rank
        self.version = 0
        self.agree: Callable[[Placement, float], None] = lambda placement, timeout_s: None

    def check(self, path: str) -> str:
        return check_weights(self.model, path)

    def refit(self, path: str, placement: Placement | None, weights_version: int, timeout_s: float) -> None:
        try:
            refit(self.model, path, placement, self.rank)
        except Exception:
            if placement is not None:
                with contextlib.suppress(Exception):  # the others wait for this rank; what it met itself says more
                    self.agree(placement, timeout_s)
            raise
        self.version = weights_version
        if placement is not None:
            self.agree(placement, timeout_s)


def _build_balancer(
    setup: RankSetup,
    model: LanguageModel,
    dispatcher: Dispatcher,
    communicator: Communicator | None,
    rank: int,
    opened: ExitStack,
) -> RankBalancer:
    weights = RankWeights(model, rank)
    if communicator is None:
        return NoRankBalancer(weights, rank, setup.placement)
    from trimtab.experts.balancer import build_rank_balancer  # off means absent

    assert setup.placement is not None, "experts move between the slots of a placement"
    balancer = build_rank_balancer(
        setup.config.eplb,
        setup.placement,
        model.moe_layers,
        dispatcher,
        communicator,
        weights,
        weights_version=lambda: weights.version,
    )
    opened.callback(balancer.close)
    weights.agree = balancer.mover.exchange
    return balancer


def _open_communicator(plan: MovementPlan | None, rank: int) -> Communicator | None:
    if plan is None:
        return None
    from trimtab.experts.movement.choice import open_communicator

    return open_communicator(plan, rank)


def _movement_plan(fields: dict[str, Any] | None) -> MovementPlan | None:
    if fields is None:
        return None
    from trimtab.experts.movement.choice import MovementPlan

    return msgspec.convert(fields, MovementPlan)


@dataclass(slots=True)
class SharedResources:
    """What the controller holds while ranks start, and in threads as long as they run."""

    setup: RankSetup
    abort: Callable[[], None]
    close: Callable[[], None]


def _create_shared(setup: RankSetup, folder: str) -> SharedResources:
    """The memory and the meeting places of the ranks; `setup` says where they are."""
    with ExitStack() as opened:
        dispatch = create_resources(setup.dispatch, folder)
        opened.callback(dispatch.close)
        setup = replace(setup, dispatch=dispatch.plan)
        if setup.movement is not None:
            from trimtab.experts.movement.choice import create_resources as create_movement_resources

            movement = create_movement_resources(setup.movement, folder)
            opened.callback(movement.close)
            setup = replace(setup, movement=movement.plan)
        return SharedResources(setup, dispatch.abort, opened.pop_all().close)


def _bind_capturer(setup: RankSetup, spec: ModelSpec, model: LanguageModel) -> RoutedExpertsCapturer:
    from trimtab.experts.data.capturer import RoutedExpertsCapturer, bind_routed_experts_capturer  # off means absent

    layout = routed_experts_layout(spec.moe_layers)
    capturer = RoutedExpertsCapturer(setup.config.max_num_batched_tokens, layout, setup.kv_cache)
    bind_routed_experts_capturer(model, capturer)
    return capturer


def build_in_process(rank: int, setup_data: bytes, progress: Progress) -> Worker:
    """A rank that knows of the engine only what it was sent. Called on: a worker process."""
    setup = RankSetup.decode(setup_data)
    return build_rank(setup, read_spec(setup.path, setup.config.dtype, setup.config.quantization), rank, progress)[0]


def start_ranks(setup: RankSetup, spec: ModelSpec, progress: Progress) -> Ranks:
    """Starts them all, by the executor that the configuration asks for. A rank that cannot start ends the others."""
    backend = setup.config.executor_backend
    if backend == "inline":
        worker, model = build_rank(setup, spec, 0, progress)
        return Ranks(InlineExecutor(worker), [worker.facts], [model], [worker])
    return (_start_threads if backend == "threads" else _start_processes)(setup, spec, progress)


def _start_threads(setup: RankSetup, spec: ModelSpec, progress: Progress) -> Ranks:
    num_ranks = setup.config.num_ranks
    folder = private_folder()
    try:
        shared = _create_shared(setup, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    setup = shared.setup
    built: dict[int, tuple[Worker, LanguageModel]] = {}

    def build(rank: int) -> Worker:
        # One rank's share is as large as another's: the first one's progress speaks for all.
        built[rank] = build_rank(setup, spec, rank, progress if rank == 0 else no_progress)
        return built[rank][0]

    def release() -> None:
        shared.close()
        remove_folder()

    # The executor drops `release` also where a rank that will not end keeps it from being called.
    remove_folder = weakref.finalize(release, _remove, folder, os.getpid())
    executor = ThreadsExecutor(
        build,
        num_ranks,
        tensor_parallel_size=setup.config.tensor_parallel_size,
        abort=shared.abort,
        release=release,
    )
    workers, models = zip(*(built[rank] for rank in range(num_ranks)), strict=True)
    return Ranks(executor, [worker.facts for worker in workers], list(models), list(workers))


def _remove(folder: str, owner: int) -> None:
    """Not in a process forked from the `owner`, whose ranks still meet there."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _start_processes(setup: RankSetup, spec: ModelSpec, progress: Progress) -> Ranks:
    folder = private_folder()
    try:
        shared = _create_shared(setup, folder)
        try:
            executor = MultiprocessExecutor(
                WORKER,
                [shared.setup.encode()] * setup.config.num_ranks,
                tensor_parallel_size=setup.config.tensor_parallel_size,
                environment={"OMP_NUM_THREADS": str(setup.num_threads)},
                progress=progress,
                folder=folder,
            )
        finally:
            shared.close()  # the ranks hold it now
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Ranks(executor, executor.facts())
