"""Sends a gang's requests to its ranks, with what differs from rank to rank."""

from __future__ import annotations

from sparkring.frameworks import FRAMEWORKS
from sparkring.frameworks.base import Framework, Start
from sparkring.gangs.execution import Execution, Request
from sparkring.gangs.members import Members
from sparkring.gangs.outbox import Outbox
from sparkring.runtime.world import World
from sparkring.wire import messages


class RequestSender:
    """Keeps what requests have in common: the frameworks that connect the ranks, and the Work that the ranks have."""

    def __init__(self, members: Members, outbox: Outbox) -> None:
        self._members = members
        self._outbox = outbox
        self._frameworks: dict[str, Framework] = {}
        self._work: messages.Work | None = None  # what was last sent to the ranks
        self._modules: dict[int, messages.ModuleFiles] = {}  # the same, by member
        self._packages: dict[int, messages.LackingPackages] = {}

    def send(self, execution: Execution, *, hold: bool = False) -> None:
        """Send the request to the ranks of `execution`. With `hold`, it may wait for Outbox.send_held()."""
        request = execution.request
        framework = self._framework(request.framework)
        if request.work is not None and request.work is not self._work:
            self._outbox.send_all(request.work)
            self._work = request.work
        for rank in execution.ranks:
            member = self._members.member_of[rank]
            if request.own_modules is not None and self._modules.get(member) != request.own_modules:
                self._outbox.send(member, request.own_modules)
                self._modules[member] = request.own_modules
            lacking = self._members.lacking(member, request.code_imports)
            # What is needed is checked again for each request.
            if lacking is not None and (lacking.needed or self._packages.get(member) != lacking):
                self._outbox.send(member, lacking)
                self._packages[member] = lacking
            if request.timeline and framework.timeline is not None:
                self._outbox.send(member, messages.RecordTimeline(framework.timeline.variable, wanted=rank == 0))
            pulled = rank == execution.ranks[0]
            self._outbox.send(member, _order(request, framework, self._members.worlds[member], pulled), hold=hold)

    def _framework(self, name: str) -> Framework:
        if name not in self._frameworks:
            self._frameworks[name] = FRAMEWORKS[name](self._members.endpoints)
        return self._frameworks[name]


def _order(request: Request, framework: Framework, world: World, pulled: bool) -> messages.Run:
    run = request.run
    environment = framework.environment(world, Start(run.checkpoints.run_id, request.restarts, request.max_restarts))
    if request.timeline and framework.timeline is not None:
        environment |= framework.timeline.beside
    return run._replace(
        parts=request.parts.get(world.rank, run.parts),
        pulled=pulled,
        barrier=framework.in_task,
        environment={**environment, **run.environment},
        defaults=framework.defaults(world),
    )
