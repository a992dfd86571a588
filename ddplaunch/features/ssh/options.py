"""The options of jobs over SSH: ``--hosts`` and others."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option, OptionGroup, Options

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class SshHosts(OptionGroup, frozen=True):
    """The hosts on which the job is started over SSH."""

    heading = "Several nodes by SSH"
    after = "token"

    # DDPLAUNCH_HOSTS has the hosts of a submitted job: it must not start another one.
    hosts: Annotated[str | None, Option("--hosts A:4,B:4",
        "Start the job over SSH on these hosts, with this many ranks each.", is_common=True, is_local=True,
        has_variable=False)] = None
    hostfile: Annotated[str | None, Option("--hostfile FILE",
        "Read the hosts from FILE, one per line: n1 slots=4", completion="file", is_local=True)] = None
    include: Annotated[str | None, Option("--include A@B:0,2",
        "Use only these hosts, or these slots of a host.", is_local=True)] = None
    exclude: Annotated[str | None, Option("--exclude A@B:0,2",
        "Skip these hosts, or these slots of a host.", is_local=True)] = None
    env: Annotated[tuple[str, ...], Option("--env NAME[=VALUE]",
        "Pass a variable to the hosts, in addition to NCCL_*, GLOO_*, TORCH_*; may be repeated.", is_local=True)] = ()
    remote_python: Annotated[str | None, Option("--remote-python PATH",
        "Path of Python on the hosts.  [default: the path of this Python]", is_local=True)] = None

    @property
    def is_used(self) -> bool:
        return self.hosts is not None or self.hostfile is not None

    def check_contradictions(self, options: Options) -> None:
        for name in () if self.is_used else self.__struct_fields__:
            if options.is_set(name):
                what = f"--{name.replace('_', '-')} works only with --hosts or --hostfile"
                local = (self.include or "").removeprefix("localhost:")  # as for deepspeed
                is_local = name == "include" and local != self.include and "@" not in local
                raise UsageError(what, f"GPUs of this machine: --gpus {local}" if is_local else "--hosts n1:4,n2:4")
