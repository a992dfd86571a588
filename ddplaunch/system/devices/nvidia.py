"""Reads NVIDIA's GPUs through NVML (nvidia-ml-py) and sysfs, and applies CUDA_VISIBLE_DEVICES to them.

Neither creates a CUDA context, so reading costs no GPU memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddplaunch.system.devices.process_usage import describe_process
from ddplaunch.system.devices.sysfs import Folder, list_numbered, read_pci_locality
from ddplaunch.system.devices.vendor import (
    KernelTrees,
    ReadResult,
    Vendor,
    VisibleGpu,
    VisibleGpus,
    format_available,
    match_uuid,
    resolve_mask,
)
from ddplaunch.system.plan.hardware import Gpu, GpuProcess, GpusFailed, LostGpu, MigInstance

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
INDEX_PATTERN = r"\s*\+?([0-9]{1,9})"

MIN_DRIVER_FOR_ALL_MIG = 570
"""First NVIDIA driver that shows a process several MIG instances (MIG User Guide, "CUDA Device Enumeration")."""

NVML_LIBRARY = "libnvidia-ml.so.1"  # comes with the driver, never with CUDA or torch
BITS_PER_WORD = 64
"""Bits in one word of NVML's masks of CPUs and NUMA nodes (unsigned long on the 64-bit systems that it supports)."""

MAX_NODES = 1 << 10  # what CONFIG_NODES_SHIFT of Linux allows at most on x86
MAX_CPUS = 1 << 13  # and CONFIG_NR_CPUS
UUID_BYTES = 16


def open_nvml() -> Any:
    """Load and initialize NVML; None if there is no library, or the driver does not answer."""
    try:
        ctypes.CDLL(NVML_LIBRARY)
    except OSError:
        return None
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def query_nvml(nvml: Any, function: Any, *arguments: Any) -> Any:
    """Call an NVML function; None if it fails: not supported by this GPU or driver, not permitted, or a lost GPU."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def read_nvidia(trees: KernelTrees) -> ReadResult:
    """Return the NVIDIA GPUs in NVML's order, and a note for each problem.

    A GPU that fails (off its bus, in need of a reset) is left out and reported; the others keep their indices.
    Raises GpusFailed if the library is installed, and the driver's device files or the driver itself show GPUs, but
    none can be read. Device files without a library are those of a container that was not given the GPUs.
    """
    try:
        ctypes.CDLL(NVML_LIBRARY)
    except OSError as error:
        notes, broken = _explain_missing_library(trees.sysfs, str(error))
        if broken:
            _check_device_files(trees.dev, notes)
        return [], notes
    # Imported late: the bindings take 20 ms, which a machine without GPUs saves.
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        why = str(error).rstrip(".")
        notes = [f"The NVIDIA driver did not list its GPUs: {why}; {_error_hint(nvml, error)}."]
        if error.value != nvml.NVML_ERROR_NO_PERMISSION:  # else they belong to another job: Slurm hides them so
            _check_device_files(trees.dev, notes)
        return [], notes
    try:
        gpus, notes_or_lost = _read_gpus(nvml, trees)
        if notes_or_lost and not gpus:
            raise GpusFailed("The NVIDIA driver lists GPUs", notes_or_lost)
        return gpus, notes_or_lost
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _check_device_files(dev: Folder, notes: list[str]) -> None:
    """Raise GpusFailed if there is a device file of a GPU: /dev/nvidia0, not /dev/nvidiactl."""
    if found := sorted(list_numbered(os.fspath(dev), "nvidia")):
        raise GpusFailed(f"{found[0][0]} is there", notes)


def _explain_missing_library(sysfs: Folder, why: str) -> tuple[list[str], bool]:
    """Return notes, and whether the library is installed but broken, such as a container's empty placeholder."""
    if "No such file" not in why:
        remedy = "install the driver's libraries, or mount them into the container"
        return [f"NVIDIA GPUs could not be read: {why}; {remedy}."], True
    if os.path.exists(os.path.join(sysfs, "module/nvidia")):
        remedy = "in a container, start it with access to the GPUs (docker run --gpus all)"
        return [f"The NVIDIA driver is loaded, but its library {NVML_LIBRARY} cannot be loaded; {remedy}."], False
    return [], False


def _error_hint(nvml: Any, error: Any) -> str:
    return {
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "load it with `modprobe nvidia`, or give the container access to the GPUs",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "it was updated while loaded, so reboot or reload the nvidia module",
        nvml.NVML_ERROR_NO_PERMISSION: "you may not open /dev/nvidiactl, so ask for access to the GPUs",
    }.get(error.value, "see what `nvidia-smi` and the kernel's log say")


def _read_gpus(nvml: Any, trees: KernelTrees) -> ReadResult:
    gpus: list[Gpu] = []
    notes: list[str | LostGpu] = []
    driver = _query(nvml, nvml.nvmlSystemGetDriverVersion)
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu = _read_gpu(nvml, index, trees, driver)
        except nvml.NVMLError as error:
            notes.append(LostGpu(index, str(error)))
            continue
        gpus.append(gpu)
        if gpu.mig_mode and not gpu.mig:
            notes.append(f"NVIDIA GPU {index} is in MIG mode but has no instances, so CUDA cannot use it.")
    return gpus, notes


def _read_gpu(nvml: Any, index: int, trees: KernelTrees, driver: str | None) -> Gpu:
    """Read one GPU.

    Raises NVMLError if it is lost or otherwise fails. Fields that it does not support are None.
    """
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    query = functools.partial(_query, nvml)
    name = nvml.nvmlDeviceGetName(handle)
    memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
    pci = _sysfs_address(query(nvml.nvmlDeviceGetPciInfo, handle))
    numa_node, cpus = read_pci_locality(trees.sysfs, pci)
    mig_mode = query(nvml.nvmlDeviceGetMigMode, handle) or (nvml.NVML_DEVICE_MIG_DISABLE, None)
    in_mig_mode = mig_mode[0] == nvml.NVML_DEVICE_MIG_ENABLE
    return Gpu(
        vendor="nvidia",
        index=index,
        name=name,
        uuid=query(nvml.nvmlDeviceGetUUID, handle),
        pci=pci,
        memory_total=memory.total if memory else None,
        memory_used=memory.used if memory else None,
        numa_node=_affine_node(nvml, handle) if numa_node is None else numa_node,
        cpus=cpus or _list_set_bits(query(nvml.nvmlDeviceGetCpuAffinity, handle, MAX_CPUS // BITS_PER_WORD)),
        mig_mode=in_mig_mode,
        mig=_read_mig(nvml, handle, name) if in_mig_mode else (),
        processes=_read_processes(nvml, handle) if trees.processes else (),
        driver=driver,
        fabric=None if in_mig_mode else _read_fabric(nvml, handle),
    )


def _read_fabric(nvml: Any, handle: Any) -> str | None:
    """Return the NVLink domain of a GPU, "CLUSTER_UUID.CLIQUE_ID"; None if it reaches no GPU of another machine.

    The UUID is all zeros where NVLink connects only the GPUs of one machine. Older drivers and bindings lack the call.
    """
    function = getattr(nvml, "nvmlDeviceGetGpuFabricInfoV", None)
    new_info = getattr(nvml, "c_nvmlGpuFabricInfo_v2_t", None)
    if function is None or new_info is None:
        return None
    info = new_info()
    if query_nvml(nvml, function, handle, ctypes.byref(info)) is None:
        return None
    cluster, has_joined = bytes(info.clusterUuid), info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED
    if not has_joined or info.status != nvml.NVML_SUCCESS or len(cluster) != UUID_BYTES or not any(cluster):
        return None
    digits = cluster.hex()
    parts = digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]
    return f"{'-'.join(parts)}.{info.cliqueId}"


def _query(nvml: Any, function: Any, *arguments: Any) -> Any:
    """Call an NVML function; None if this GPU or driver does not support it, or it is not permitted."""
    try:
        return function(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return None


def _sysfs_address(info: Any) -> str | None:
    """Return the PCI address as in /sys/bus/pci/devices, "0000:17:00.0"; NVML writes "00000000:17:00.0", upper case."""
    if info is None:
        return None
    domain, _, rest = info.busId.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _affine_node(nvml: Any, handle: Any) -> int | None:
    """Return the NUMA node of the CPUs near the GPU, for kernels whose sysfs has none.

    Not nvmlDeviceGetNumaNodeId: on some platforms a GPU's own memory is a NUMA node, and this is its number.
    """
    size = MAX_NODES // BITS_PER_WORD
    nodes = _list_set_bits(_query(nvml, nvml.nvmlDeviceGetMemoryAffinity, handle, size, nvml.NVML_AFFINITY_SCOPE_NODE))
    return nodes[0] if len(nodes) == 1 else None


def _list_set_bits(words: Any) -> tuple[int, ...]:
    """The numbers of the bits that are set in a mask, given as words of 64 bits."""
    nonzero = [(index, word) for index, word in enumerate(words or ()) if word]
    return tuple(
        BITS_PER_WORD * index + bit for index, word in nonzero for bit in range(BITS_PER_WORD) if word >> bit & 1
    )


def _read_mig(nvml: Any, parent: Any, parent_name: str) -> tuple[MigInstance, ...]:
    instances = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index)
        except nvml.NVMLError_NotFound:
            continue  # indices may have gaps
        memory = _query(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        # NVML's name is that of the GPU, followed by the profile: "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
        name = nvml.nvmlDeviceGetName(handle).removeprefix(parent_name).strip()
        instances.append(
            MigInstance(
                uuid=nvml.nvmlDeviceGetUUID(handle),
                name=name or "MIG",
                memory_total=memory.total if memory else None,
                gpu_instance=_query(nvml, nvml.nvmlDeviceGetGpuInstanceId, handle),
                compute_instance=_query(nvml, nvml.nvmlDeviceGetComputeInstanceId, handle),
            )
        )
    return tuple(instances)


def _read_processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    running = _query(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return tuple(describe_process(process.pid, process.usedGpuMemory) for process in running)


# CUDA's environment variables.


def _apply_visible_devices(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> VisibleGpus:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does (CUDA Programming Guide, "CUDA Environment Variables").

    An invalid entry ends the list. A duplicate hides every GPU, and letters after an index are ignored: neither is
    documented; torch does the same (``torch.cuda._parse_visible_devices``).
    """
    mask = environ.get(VISIBLE_DEVICES_VARIABLE)
    if mask is None:
        everything = [device for gpu in gpus for device in _devices_of(gpu)]
        visible, notes = drop_hidden_mig(everything)
        return VisibleGpus(tuple(visible), "NVML", notes=(*notes, *_gpu_order_notes(gpus, environ)))
    find = functools.partial(_resolve_entry, gpus)
    available = format_available(gpus)
    named, notes = resolve_mask(VISIBLE_DEVICES_VARIABLE, mask, available, find, on_duplicate="hides all")
    visible, dropped = drop_hidden_mig(named)
    if any(re.match(INDEX_PATTERN, entry) for entry in mask.split(",")):
        notes += _gpu_order_notes(gpus, environ)
    return VisibleGpus(tuple(visible), VISIBLE_DEVICES_VARIABLE, notes=(*notes, *dropped))


def _resolve_entry(gpus: Sequence[Gpu], entry: str) -> list[VisibleGpu]:
    """Resolve an index, a "GPU-" UUID or a prefix of it, a "MIG-" UUID or the older "MIG-GPU-<uuid>/<gi>/<ci>"."""
    number = re.match(INDEX_PATTERN, entry)
    if number:
        return next((_devices_of(gpu) for gpu in gpus if gpu.index == int(number[1])), [])
    matches = match_uuid(gpus, entry.strip(), _devices_of)
    return matches[0] if len(matches) == 1 else []


def _select(chosen: Sequence[VisibleGpu], notes: list[str], environ: Mapping[str, str]) -> VisibleGpus:
    variables = {VISIBLE_DEVICES_VARIABLE: ",".join(device.token for device in chosen)}
    if any(device.token.isdecimal() for device in chosen):
        variables[DEVICE_ORDER_VARIABLE] = "PCI_BUS_ID"  # NVML's order, so that indices are the same
    return VisibleGpus(tuple(chosen), "--gpus", variables, tuple(notes))


def _devices_of(gpu: Gpu) -> list[VisibleGpu]:
    """Return the GPU or, in MIG mode, each of its instances: CUDA has no device for the whole GPU then."""
    if gpu.mig:
        return [VisibleGpu(gpu, mig, mig.uuid) for mig in gpu.mig]
    return [VisibleGpu(gpu, None, gpu.uuid or str(gpu.index))]


def _do_indices_match(gpus: Sequence[Gpu]) -> bool:
    """Whether CUDA, if it numbers GPUs in PCI bus order, gives each GPU the same index as NVML.

    CUDA skips GPUs that are lost, or in MIG mode without instances, and may count each instance of one in MIG mode.
    """
    return [gpu.index for gpu in gpus] == [*range(len(gpus))] and not any(gpu.mig_mode or gpu.mig for gpu in gpus)


def drop_hidden_mig(named: Sequence[VisibleGpu]) -> tuple[list[VisibleGpu], list[str]]:
    """Remove the devices that one process cannot see together with a MIG instance; return the others, and notes.

    From driver 570 on, that is a second compute instance of the same GPU instance; before, everything but the first
    MIG instance (MIG User Guide, "CUDA Device Enumeration").
    """
    first_mig = next((device for device in named if device.mig), None)
    if first_mig is None:
        return list(named), []
    driver = first_mig.gpu.driver or "of unknown version"
    major = re.match(r"\d+", driver)
    if major is None or int(major[0]) < MIN_DRIVER_FOR_ALL_MIG:
        visible = [first_mig]
        rule = f"NVIDIA driver {driver} shows a process one MIG instance and nothing else"
    else:
        slices = [(each.gpu, each.mig.gpu_instance) if each.mig else each for each in named]
        visible = [device for index, device in enumerate(named) if slices[index] not in slices[:index]]
        rule = "CUDA shows one compute instance of each GPU instance"
    if len(visible) == len(named):
        return visible, []
    return visible, [f"{rule}, so {len(visible)} of {len(named)} are used; name others by MIG UUID to choose."]


def _gpu_order_notes(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[str]:
    """Warn if indices may differ: by default CUDA numbers from the fastest GPU, NVML in PCI bus order."""
    if len({gpu.name for gpu in gpus}) < 2 or environ.get(DEVICE_ORDER_VARIABLE) == "PCI_BUS_ID":
        return []
    return [
        "The GPUs differ, and CUDA may number them in another order than shown;"
        f" set {DEVICE_ORDER_VARIABLE}=PCI_BUS_ID."
    ]


NVIDIA = Vendor(
    "nvidia",
    "NVIDIA",
    "cuda",
    read_nvidia,
    _apply_visible_devices,
    _select,
    backend="nccl",
    masks=(VISIBLE_DEVICES_VARIABLE,),
    hide_all_variables={VISIBLE_DEVICES_VARIABLE: ""},
    devices_of_gpu=_devices_of,
    indices_hold=_do_indices_match,
)
