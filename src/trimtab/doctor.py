"""Is a balanced model healthy? A short session with experts on the move, and four anchors that it is held against.

1. `start` gives a patient: an engine of ranks as threads, so that what they hold can be looked at; 2. `examine` runs
requests, moves experts under them and says which anchors hold. `diagnose` does both.

The anchors stand in the order of cause and effect: behind the first that fails, later ones may fail for its sake.
"""

# L MoE layers  E experts  P slots  S slots/rank  H hidden size

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from trimtab.assemble import Parts, assemble, eplb_refusal
from trimtab.config import EngineConfig
from trimtab.experts.balancer import RankBalancer
from trimtab.experts.control.support import ExecutionFacts, unsupported
from trimtab.experts.data.capture import ExpertUsage
from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.movement.verify import SlotMismatchError
from trimtab.experts.placement import Placement
from trimtab.models.resolve import resolve_model
from trimtab.models.spec import ModelSpec, read_spec
from trimtab.observability.interrupts import hold_interrupts
from trimtab.observability.progress import Progress, no_progress
from trimtab.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trimtab.experts.control.controller import Controller

NUM_RANKS = 2
NUM_PROMPTS = 5  # an odd number: ranks are busy and idle in turns
MAX_STEPS = 20_000  # of waiting for a rearrangement, which its own timeout ends long before
MAX_DETAILS = 4
SHUFFLE = "trimtab.experts.control.policy.shuffle:ShufflingPolicy"


@dataclass(frozen=True, slots=True)
class Anchor:
    """What can be wrong, as its symptom shows it, and where to look then."""

    name: str
    symptom: str
    checks: str
    look_at: str
    files: tuple[str, ...]


SUPPORT = Anchor(
    "support",
    "refused start",
    "what works is admitted, what does not is refused with its reason",
    "the support table",
    ("src/trimtab/experts/control/support.py", "src/trimtab/experts/formats/movable.py"),
)
SELECTION = Anchor(
    "selection",
    "stale selection",
    "look-ups are what the placement says, and all ranks have one placement",
    "placement and refresh",
    ("src/trimtab/experts/balancer.py", "src/trimtab/experts/data/routing_table.py"),
)
WEIGHTS = Anchor(
    "weights",
    "moved but unchanged behaviour",
    "every slot holds its expert's bytes, and computes as that expert",
    "the weight view",
    ("src/trimtab/experts/movement/mover.py", "src/trimtab/experts/data/kernels/native.py"),
)
LOAD = Anchor(
    "load",
    "shifted load",
    "the load recorded in slots is the experts that the router chose",
    "slot ids and padding",
    ("src/trimtab/experts/data/map_and_record.py", "src/trimtab/experts/data/load_recorder.py"),
)
ANCHORS = (SUPPORT, SELECTION, WEIGHTS, LOAD)

# A fact that must be refused, and its value in words that the reason must hold.
REFUSED: dict[str, Any] = {
    "model_runner": "v1",
    "enable_expert_parallel": False,
    "num_ranks": 1,
    "executor": "inline",
    "dispatcher": "local",
    "communicator": "carrier pigeon",
    "async_depth": 3,
    "expert_format": "papyrus",
    "kernel": "abacus",
    "experts_per_layer": (8, 4),
}


@dataclass(frozen=True, slots=True)
class Finding:
    anchor: Anchor
    status: str  # "passed", "failed", or "unclear": not reached, or a failure before it explains it
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]  # in the order of ANCHORS
    session: dict[str, Any] = field(default_factory=dict)  # what was run and moved; empty where nothing started

    @property
    def is_healthy(self) -> bool:
        return all(finding.status == "passed" for finding in self.findings)

    @property
    def cause(self) -> Finding | None:
        """The first anchor that failed."""
        return next((finding for finding in self.findings if finding.status == "failed"), None)


def diagnose(
    model: str, *, dtype: str = "auto", quantization: str | None = None, progress: Progress = no_progress
) -> Diagnosis:
    """Raises ValueError for a model that is none or that cannot run even without balancing."""
    problems = support_problems()
    path = resolve_model(model, progress)
    spec = read_spec(path, dtype, quantization)
    config = session_config(path, spec, dtype, quantization)
    if reason := eplb_refusal(config, spec):
        problems.append(f"this model is refused: {reason}")
    if problems:
        return Diagnosis(_findings({SUPPORT.name: problems}, has_run=False))
    with start(config, progress) as patient:
        return examine(patient, progress)


def session_config(path: Path, spec: ModelSpec, dtype: str, quantization: str | None) -> EngineConfig:
    """Two ranks as threads; decisions come when they are asked for, and move as much as they can."""
    num_experts = spec.moe_layers[0].num_experts if spec.moe_layers else 0
    return EngineConfig(
        model=str(path),
        dtype=dtype,
        quantization=quantization,
        max_model_len=min(96, spec.max_position),
        max_num_seqs=8,
        max_num_batched_tokens=48,  # prompts come in chunks, among decoding requests
        enable_prefix_caching=False,  # each token passes the experts: it is counted below
        data_parallel_size=NUM_RANKS,
        enable_expert_parallel=True,
        distributed_executor_backend="threads",
        enable_eplb=True,
        eplb_config={
            "window_size": 2**20,
            "step_interval": 2**30,
            "num_redundant_experts": 2 + (num_experts + 2) % NUM_RANKS,
            "policy": SHUFFLE,
            "stall_timeout_s": 30.0,
        },
    )


def support_problems() -> list[str]:
    """What the support table gets wrong: all of `REFUSED` must be refused by name, and its twin admitted."""
    problems = [f"the simplest way of running is refused: {reason}" for reason in unsupported(ExecutionFacts())]
    for name, value in REFUSED.items():
        reasons = unsupported(replace(ExecutionFacts(), **{name: value}))
        named = str(value[-1] if isinstance(value, tuple) else value)
        if not any(named in reason for reason in reasons):
            problems.append(f"{name} {value!r} is not refused by its name")
    return problems


@dataclass(slots=True)
class Patient:
    """An engine under examination. What is held against later states is noted at its start."""

    parts: Parts
    lookup_addresses: list[list[int]]  # [rank][L]
    fingerprints: list[torch.Tensor]  # by layer: fp32 [E, H], an expert's answer to the probe
    probes: list[torch.Tensor]  # by layer: [1, H]

    @property
    def controller(self) -> Controller:
        return cast("Controller", self.parts.engine.balancer)

    @property
    def ranks(self) -> list[RankBalancer]:
        return [cast(RankBalancer, cast(Any, worker.runner).balancer) for worker in self.parts.workers]


@contextmanager
def start(config: EngineConfig, progress: Progress = no_progress) -> Iterator[Patient]:
    parts = assemble(config, progress)
    try:
        generator = torch.Generator().manual_seed(0)
        sizes = [layer.shape.hidden_size for layer in parts.models[0].moe_layers]
        probes = [torch.randn(1, size, generator=generator).to(parts.spec.dtype) for size in sizes]
        patient = Patient(parts, [], [], probes)
        patient.lookup_addresses = [
            [layer.routing_table.slots.data_ptr() for layer in model.moe_layers] for model in parts.models
        ]
        patient.fingerprints = _fingerprints(patient)
        yield patient
    finally:
        parts.engine.shutdown()


def examine(patient: Patient, progress: Progress = no_progress) -> Diagnosis:
    """Runs requests, moves experts once under them and once without, and checks all that can be checked on the way."""
    problems: dict[str, list[str]] = {anchor.name: [] for anchor in ANCHORS}
    models = patient.parts.models
    usage = ExpertUsage(len(models[0].moe_layers), models[0].moe_layers[0].num_experts)
    layers = [layer for model in models for layer in model.moe_layers]
    usage.attach(layers)
    session = _Session(patient, problems, progress)
    try:
        session.move(with_requests=True)
        session.move(with_requests=False)  # its decision also brings the last steps' load
    except Exception as error:
        problems[WEIGHTS.name].append(f"the session ended early: {type(error).__name__}: {error}")
    else:
        _check_load(patient, usage.counts.numpy(), session.num_tokens, problems[LOAD.name])
    finally:
        usage.detach(layers)
    stats = patient.controller.stats()
    if not stats["moves"]:
        problems[WEIGHTS.name].append("no expert moved: nothing was proven")
    numbers = {name: stats[name] for name in ("moves", "moves_by_kind", "mixed_layer_steps", "rearrangements")}
    numbers |= {"num_ranks": len(models), "num_moe_layers": usage.counts.shape[0], "num_tokens": session.num_tokens}
    return Diagnosis(_findings(problems, has_run=True), numbers)


def _findings(problems: dict[str, list[str]], *, has_run: bool) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    for anchor in ANCHORS:
        found = list(dict.fromkeys(problems.get(anchor.name, [])))
        details = tuple(found[:MAX_DETAILS])
        if len(found) > MAX_DETAILS:
            details += (f"and {len(found) - MAX_DETAILS} more",)
        cause = next((finding for finding in findings if finding.status == "failed"), None)
        if cause is None:
            status = "failed" if found else "passed" if has_run or anchor is SUPPORT else "unclear"
        else:
            status = "unclear" if found or not has_run else "passed"
        findings.append(Finding(anchor, status, details))
    return tuple(findings)


class _Session:
    """Requests and rearrangements, one step at a time, with a look after each commit."""

    def __init__(self, patient: Patient, problems: dict[str, list[str]], progress: Progress) -> None:
        self.patient, self.problems, self.progress = patient, problems, progress
        self.num_tokens = 0  # that passed the network
        self._random = np.random.default_rng(0)
        self._num_requests = self._num_commits = 0
        self._digest = patient.controller.placement.digest()

    def move(self, *, with_requests: bool) -> None:
        """One rearrangement, from its request to its end."""
        controller, engine = self.patient.controller, self.patient.parts.engine
        if with_requests:
            self._step()
        before = sum(controller.stats()["rearrangements"].values())
        controller.request_rearrangement()
        for _ in range(MAX_STEPS):
            has_ended = sum(controller.stats()["rearrangements"].values()) > before and controller.is_at_rest
            if with_requests and not has_ended and engine.num_unfinished < NUM_PROMPTS:
                self._add_request()
            elif has_ended and not engine.has_unfinished:
                break
            self._step()
        self._note_outcome()
        self._look_at_weights()

    def _add_request(self) -> None:
        vocab_size, self._num_requests = self.patient.parts.spec.vocab_size, self._num_requests + 1
        prompt = self._random.integers(0, vocab_size, self._random.integers(1, 60)).tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
        self.patient.parts.engine.add_request(str(self._num_requests), prompt, sampling)

    def _step(self) -> None:
        if not self.patient.parts.engine.has_work:
            self._add_request()
        with hold_interrupts():
            outputs = self.patient.parts.engine.step()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.finished:  # its last token was sampled and not computed with
                self.num_tokens += len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        digest = self.patient.controller.placement.digest()
        if digest != self._digest:
            self._digest = digest
            self._num_commits += 1
            self.progress("moving experts", self._num_commits, 2 * self.patient.controller.placement.num_layers)
            self._look_at_selection()

    def _note_outcome(self) -> None:
        for event in self.patient.parts.events.recent():
            if event["event"] in ("aborted", "policy_failed"):
                self.problems[WEIGHTS.name].append(f"a rearrangement was given up: {event['reason']}")

    def _look_at_selection(self) -> None:
        """Against tables made anew from the placement, and against the placement itself."""
        placement, problems = self.patient.controller.placement, self.problems[SELECTION.name]
        for rank, (balancer, model) in enumerate(zip(self.patient.ranks, self.patient.parts.models, strict=True)):
            if balancer.placement.digest() != placement.digest():
                problems.append(f"rank {rank} has another placement than the controller")
            for ordinal, layer in enumerate(model.moe_layers):
                table = layer.routing_table
                experts = placement.slot_to_expert[ordinal][table.slots.numpy()]
                if wrong := int((experts != np.arange(len(experts))[:, None]).any(axis=1).sum()):
                    problems.append(f"layer {ordinal}, rank {rank}: {wrong} experts are looked up in others' slots")
                elif not table.slots.equal(RoutingTable(placement, ordinal, table.token_group).slots):
                    problems.append(f"layer {ordinal}, rank {rank}: replicas do not get the placement's shares")
                if table.slots.data_ptr() != self.patient.lookup_addresses[rank][ordinal]:
                    problems.append(f"layer {ordinal}, rank {rank}: the look-up's tensor is another one than at start")

    def _look_at_weights(self) -> None:
        placement, problems = self.patient.controller.placement, self.problems[WEIGHTS.name]
        for balancer in self.patient.ranks:
            try:
                cast(Any, balancer.mover).check_slots(placement)
            except SlotMismatchError as error:
                problems.append(str(error))
        for ordinal in range(placement.num_layers):
            answers = _answers(self.patient, ordinal)
            nearest = torch.cdist(answers, self.patient.fingerprints[ordinal]).argmin(dim=1).numpy()
            wrong = np.flatnonzero(nearest != placement.slot_to_expert[ordinal])
            if wrong.size:
                slot = int(wrong[0])
                problems.append(
                    f"layer {ordinal}, rank {placement.topology.rank_of(slot)}: slot {slot} computes as expert "
                    f"{nearest[slot]} and holds expert {placement.slot_to_expert[ordinal, slot]} by the placement"
                )


@torch.inference_mode()
def _answers(patient: Patient, ordinal: int) -> torch.Tensor:
    """fp32 [P, H]: what every slot of a layer computes of the probe. Called on: the engine's thread, between steps."""
    parts = []
    for model in patient.parts.models:
        kernel = model.moe_layers[ordinal].kernel
        rows = patient.probes[ordinal].expand(kernel.num_slots, -1).contiguous()
        parts.append(kernel.experts(rows, torch.arange(kernel.num_slots)).float().clone())
    return torch.cat(parts)


def _fingerprints(patient: Patient) -> list[torch.Tensor]:
    placement: Placement = patient.controller.placement
    found = []
    for ordinal in range(placement.num_layers):
        answers = _answers(patient, ordinal)
        by_expert = answers.new_empty(placement.topology.num_experts, answers.shape[1])
        by_expert[torch.from_numpy(placement.slot_to_expert[ordinal].copy())] = answers
        found.append(by_expert)
    return found


def _check_load(patient: Patient, chosen: np.ndarray, num_tokens: int, problems: list[str]) -> None:
    """chosen [L, E]: what routers chose, seen before the look-up; the recorded load came back from slots."""
    recorded = patient.controller.window.load().counts
    top_k = np.array([layer.top_k for layer in patient.parts.models[0].moe_layers])
    expected = num_tokens * top_k
    for layer in np.flatnonzero(recorded.sum(axis=1) != expected).tolist():
        problems.append(
            f"layer {layer}: {recorded[layer].sum()} pairs were recorded of {num_tokens} tokens x top-{top_k[layer]} "
            f"= {expected[layer]}"
        )
    for layer, expert in np.argwhere(recorded != chosen).tolist():
        problems.append(
            f"layer {layer}, expert {expert}: {recorded[layer, expert]} tokens were recorded and "
            f"{chosen[layer, expert]} chosen by the router"
        )
