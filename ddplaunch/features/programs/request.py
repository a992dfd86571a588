"""Request of ``--services``: the addresses of the programs of a running job."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.base.types import Count, Name
from ddplaunch.core.control_socket.request import Request, RequestContext
from ddplaunch.features.programs.node import ProgramRunner


class ServiceAddress(Struct, frozen=True):
    """The address of one process of a program; several processes come in their order."""

    program: Name
    port: Name  # the name of the port; "" for the one without a name
    host: Name
    number: Count  # of the port; 0: the program has no port


class Services(Struct, frozen=True):
    """The programs of a job; ``is_ready``: whether the programs that its ranks wait for are ready."""

    is_ready: bool
    addresses: tuple[ServiceAddress, ...] = ()


class ListServices(Request[Services], frozen=True):
    answers = (Services,)

    def handle(self, context: RequestContext) -> None:
        side = context.job.find_side(ProgramRunner)
        found = side.list_addresses() if side else []
        is_ready = side is None or side.is_gate_open
        context.send(Services(is_ready, tuple(ServiceAddress(*each) for each in found)))
        context.finish()
