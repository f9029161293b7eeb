"""One scheduler per data-parallel rank, all of them in lockstep: MoE layers are collective, so steps are too."""

from __future__ import annotations

from trimtab.engine.request import Request
from trimtab.engine.scheduler import Progress, Scheduler
from trimtab.plan import StepOutput, StepPlan


class DataParallelScheduler:
    """The ranks' schedulers as one.

    1. `add` gives sequences to one rank; `finish` ends one from outside.
    2. `schedule` makes one plan per rank with the same `step_id`, or None while no rank has anything to compute.
    3. `advance` takes the outputs of the oldest step in flight.
    """

    def __init__(self, ranks: list[Scheduler]) -> None:
        self.ranks = ranks
        self._step_id = 0

    @property
    def num_unfinished(self) -> int:
        return sum(rank.num_unfinished for rank in self.ranks)

    @property
    def num_preemptions(self) -> int:
        return sum(rank.num_preemptions for rank in self.ranks)

    def add(self, sequences: list[Request], rank: int | None = None) -> None:
        """Queues them together, so that they share their prompt's blocks; without `rank`, where least is unfinished."""
        if rank is None:
            # The lowest of equals: turns of one conversation come back to the rank that has its prefix.
            rank = min(range(len(self.ranks)), key=lambda index: self.ranks[index].num_unfinished)
        for request in sequences:
            request.dp_rank = rank
            self.ranks[rank].add(request)

    def finish(
        self, request: Request, reason: str, *, stop_reason: str | None = None, error: str | None = None
    ) -> None:
        self.ranks[request.dp_rank].finish(request, reason, stop_reason=stop_reason, error=error)

    def freeze_rows(self, request: Request) -> None:
        """Copies to the request the routed experts of what is computed of it."""
        self.ranks[request.dp_rank].row_store.freeze(request)

    def schedule(self) -> list[StepPlan] | None:
        plans = [rank.schedule(self._step_id) for rank in self.ranks]
        if all(plan is None for plan in plans):
            return None
        step = [plan or empty for plan, empty in zip(plans, self.command_step(), strict=True)]
        for plan in step:
            plan.runs_forward = True
        return step

    def command_step(self) -> list[StepPlan]:
        """A step in which no rank computes."""
        step_id, self._step_id = self._step_id, self._step_id + 1
        return [StepPlan(step_id) for _ in self.ranks]

    def advance(self, plans: list[StepPlan], outputs: list[StepOutput]) -> list[Progress]:
        """Takes one step's outputs, in the order of the steps."""
        progress: list[Progress] = []
        for rank, plan, output in zip(self.ranks, plans, outputs, strict=True):
            assert output.step_id == plan.step_id, f"output of step {output.step_id} taken for step {plan.step_id}"
            if plan.scheduled:
                progress += rank.advance(plan, output)
        return progress
