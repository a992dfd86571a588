"""What a sound machine says of itself, for tests that change a part of it."""

from ddplaunch.commands.doctor.checks.kernel import Limits
from ddplaunch.commands.doctor.checks.network import Link
from ddplaunch.commands.doctor.checks.torch import Torch
from ddplaunch.commands.doctor.facts import NodeFacts

GIB = 1 << 30

FACTS = NodeFacts(
    host="n0",
    ddplaunch="0.1.0",
    python="3.11.7",
    kernel="6.18",
    torch=Torch("2.13.0", cuda=None, nccl=None, cuda_works=False, devices=0),
    torch_error=None,
    gpus=(),
    gpus_error=None,
    lost_gpus=(),
    folders=(),
    limits=Limits(memlock=None, open_files=None, processes=None, processes_left=None),
    memory_total=16 * GIB,
    memory_available=8 * GIB,
    cpus=2,
    quota=None,
    load=0.5,
    infiniband=(),
    link=Link("10.0.0.1", "eth0", 1500),
    link_error=None,
    loopback=None,
    clock_synchronised=None,
)
