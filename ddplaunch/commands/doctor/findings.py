"""What the facts of one machine mean for a job: pure, a rule a function, the values compared in each sentence."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from ddplaunch.agent.check import DISK_NEEDED, GPU_BUSY, SHM_NEEDED
from ddplaunch.commands.doctor.facts import Facts, Folder
from ddplaunch.commands.doctor.inquiry import DEADLINE
from ddplaunch.dataclass import dataclass
from ddplaunch.devices.gpu_health import GpuHealth
from ddplaunch.words import size

GIB = 1 << 30

LOADERS_NEED = GIB  # bytes of /dev/shm that the loaders of a few ranks fill at once
LITTLE_DISK = GIB
LITTLE_MEMORY = 2 * GIB
FEW_FILES = 1024
FEW_PROCESSES = 1024


class Severity(Enum):
    """How much it matters: an error breaks a job, a warning slows it or may break it, a note is good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    severity: Severity
    subject: str  # "n1", "n1 GPU 3", "n0 to n2"
    text: str
    hint: str  # what to do


Found = Iterator[Finding]


def machine_findings(name: str, facts: Facts) -> Found:
    """What is wrong with one machine, whatever the others are."""
    for rule in (_torch, _gpus, _shared_memory, _folders, _limits, _memory, _processors, _loopback):
        yield from rule(name, facts)


def _torch(name: str, facts: Facts) -> Found:
    if facts.torch is None:
        yield Finding(
            Severity.ERROR, name, facts.torch_error or "no torch", "install torch for this Python: pip install torch"
        )
        return
    if facts.gpus and not facts.torch.cuda and any(gpu.driver for gpu in facts.gpus):
        gpus = f"{len(facts.gpus)} GPU{'s' * (len(facts.gpus) > 1)}"
        text = f"torch {facts.torch.version} was built without CUDA, and this machine has {gpus}"
        yield Finding(Severity.ERROR, name, text, "install a build with CUDA: https://pytorch.org/get-started")
    if facts.torch.why_not and facts.gpus and not facts.lost_gpus:  # one that is lost keeps CUDA from the others
        driver = next((gpu.driver for gpu in facts.gpus if gpu.driver), "unknown")
        text = f"torch cannot use CUDA {facts.torch.cuda} with driver {driver}: {facts.torch.why_not}"
        yield Finding(Severity.ERROR, name, text, "update the driver, or install torch for an older CUDA")
    if facts.torch.architectures:
        for index, capability in enumerate(facts.torch.capabilities):
            if not _runs(capability, facts.torch.architectures):
                built = ", ".join(facts.torch.architectures)
                text = f"it is {capability}, and torch {facts.torch.version} was built for {built}"
                yield Finding(Severity.ERROR, f"{name} cuda:{index}", text, "install another build of torch")


def _runs(capability: str, architectures: tuple[str, ...]) -> bool:
    """Whether kernels for one of these run on such a GPU: of the same major version, or PTX for an older one."""
    major, minor = divmod(int(capability.removeprefix("sm_")), 10)
    for each in architectures:
        kind, _, digits = each.partition("_")
        if not digits[:-1].isdigit() or not digits[-1:].isdigit():  # "sm_90a", or AMD's "gfx90a"
            if kind.startswith("gfx"):
                return True
            digits = digits.rstrip("af")
        built = divmod(int(digits), 10)
        if kind == "compute" and built <= (major, minor):
            return True
        if kind == "sm" and built[0] == major and built[1] <= minor:
            return True
    return False


def _gpus(name: str, facts: Facts) -> Found:
    if facts.gpus_error:
        severity = Severity.WARNING if facts.gpus else Severity.ERROR
        yield Finding(severity, name, facts.gpus_error, "see what `nvidia-smi` and the kernel's log (dmesg) say")
    for lost in facts.lost_gpus:
        hint = "look for Xid in the kernel's log (dmesg), and reboot; if it is lost again, have it replaced"
        yield Finding(Severity.ERROR, f"{name} GPU {lost.index}", f"the driver cannot reach it: {lost.why}", hint)
    for gpu in facts.gpus:
        yield from _gpu(f"{name} GPU {gpu.index}", gpu)


def _gpu(subject: str, gpu: GpuHealth) -> Found:
    if gpu.memory_used is not None and gpu.memory_total and (gpu.processes or gpu.memory_used > GPU_BUSY):
        users = ", ".join(each.described for each in gpu.processes)
        used = f"{size(gpu.memory_used)} of {size(gpu.memory_total)} are in use"
        text = f"{used}, by {users}" if users else f"{used}, by processes that this user cannot see"
        yield Finding(Severity.WARNING, subject, text, "end what uses it, or leave the GPU out: --gpus")
    if gpu.worn_out:
        text = "rows of its memory are broken, and no spare ones are left"
        yield Finding(Severity.ERROR, subject, text, "leave the GPU out (--gpus), and have it replaced")
    elif gpu.needs_reset:
        text = "rows or pages of its memory will be replaced at the next reset"
        yield Finding(
            Severity.WARNING, subject, text, "reset it while nobody uses it: nvidia-smi --gpu-reset, or reboot"
        )
    if gpu.memory_errors:
        text = f"{gpu.memory_errors} memory errors that ECC could not correct since the driver was loaded"
        yield Finding(Severity.WARNING, subject, text, "reset the GPU; if they come again, have it replaced")
    if gpu.slowed_by:
        heat = "" if gpu.temperature is None else f" at {gpu.temperature} °C"
        text = f"its clock is held down by {' and '.join(gpu.slowed_by)}{heat}"
        yield Finding(Severity.WARNING, subject, text, "look at the cooling and the power supply of the machine")


def _shared_memory(name: str, facts: Facts) -> Found:
    shm = next((folder for folder in facts.folders if folder.what == "/dev/shm"), None)
    if shm is None or shm.free is None or shm.error or shm.silent:
        return
    if shm.free < LOADERS_NEED:
        severity = Severity.ERROR if shm.free <= SHM_NEEDED else Severity.WARNING
        text = (
            f"/dev/shm has {size(shm.free)} free of {size(shm.total or 0)}; DataLoader workers and NCCL "
            "need more, often over 1 GiB"
        )
        yield Finding(
            severity, name, text, "docker run --shm-size 16g (or --ipc host); else mount -o remount,size=16g /dev/shm"
        )


def _folders(name: str, facts: Facts) -> Found:
    for folder in facts.folders:
        yield from _folder(name, folder)


def _folder(name: str, folder: Folder) -> Found:
    vital = folder.what in ("TMPDIR", "/dev/shm")
    if folder.silent:
        text = f"the file system of {folder.what} did not answer in {DEADLINE:g} s"
        yield Finding(Severity.ERROR, name, text, "look at the file server and the mount (`mount`, dmesg)")
    elif folder.error:
        severity = Severity.ERROR if vital else Severity.WARNING
        yield Finding(severity, name, f"nothing can be written to {folder.what}: {folder.error}", _elsewhere(folder))
    elif folder.what != "/dev/shm" and folder.free is not None and folder.free < LITTLE_DISK:
        severity = Severity.ERROR if folder.free < DISK_NEEDED else Severity.WARNING
        text = f"{folder.what} has {size(folder.free)} free of {size(folder.total or 0)}"
        yield Finding(severity, name, text, f"free some space, or {_elsewhere(folder)}")


def _elsewhere(folder: Folder) -> str:
    return "choose another: export TMPDIR=FOLDER" if folder.what == "TMPDIR" else "choose another folder"


def _limits(name: str, facts: Facts) -> Found:
    limits = facts.limits
    if facts.infiniband and limits.memlock is not None:
        text = f"at most {size(limits.memlock)} of memory can be locked (ulimit -l), and InfiniBand needs no limit"
        yield Finding(
            Severity.WARNING, name, text, "memlock unlimited in limits.conf, or docker run --ulimit memlock=-1"
        )
    if limits.open_files is not None and limits.open_files < FEW_FILES:
        text = f"a process may have {limits.open_files} open files (ulimit -n), and DataLoader workers use many"
        yield Finding(Severity.WARNING, name, text, f"ulimit -n {64 * FEW_FILES}")
    for count, what, remedy in (
        (limits.processes, "this user may have {} processes and threads (ulimit -u)", "ulimit -u unlimited"),
        (limits.processes_left, "the control group allows {} more processes and threads (pids.max)", "raise pids.max"),
    ):
        if count is not None and count < FEW_PROCESSES:
            text = f"{what.format(count)}; each rank has dozens of threads"
            yield Finding(Severity.WARNING, name, text, remedy)


def _memory(name: str, facts: Facts) -> Found:
    if facts.memory_available is not None and facts.memory_available < LITTLE_MEMORY:
        text = f"{size(facts.memory_available)} of memory are available of {size(facts.memory_total or 0)}"
        yield Finding(Severity.WARNING, name, text, "end what uses it, or ask for more memory")


def _processors(name: str, facts: Facts) -> Found:
    if facts.quota is not None and facts.quota < facts.cpus:
        text = f"the control group allows the time of {facts.quota:g} of {facts.cpus} CPUs"
        severity = Severity.WARNING if facts.quota < max(1, len(facts.gpus)) else Severity.NOTE
        yield Finding(severity, name, text, "raise its quota: docker run --cpus, resources.limits.cpu")
    if busy(facts):
        text = f"{facts.load:.0f} processes want to run, and there are {facts.cpus} CPUs for them"
        yield Finding(Severity.WARNING, name, text, "see with `top` what else runs there")


def busy(facts: Facts) -> bool:
    """Whether more wants to run there than can."""
    return facts.load > 1.5 * facts.cpus + 1


def held_back(facts: Facts) -> bool:
    """Whether its CPUs have too little time, as a warning says: what is slow there is so for that."""
    return busy(facts) or (facts.quota is not None and facts.quota < min(facts.cpus, max(1, len(facts.gpus))))


def _loopback(name: str, facts: Facts) -> Found:
    if facts.loopback:
        text = f"a connection to itself (127.0.0.1) {facts.loopback}, so nothing was measured there"
        hint = "let the firewall pass the interface lo: iptables -I INPUT -i lo -j ACCEPT"
        yield Finding(Severity.ERROR, name, text, hint)
