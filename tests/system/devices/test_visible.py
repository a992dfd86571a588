"""Tests of which GPUs a job uses: every form of the vendors' variables and of --gpus, with made-up hardware."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.system.devices.vendor import VisibleGpus
from ddplaunch.system.devices.visible_gpus import single_device_environments, visible_gpus
from ddplaunch.system.plan.hardware import Cpu, Gpu, Hardware, MigInstance, NumaNode

NO_SUCH_GPU = "this machine has no GPU"

CPU = Cpu(name=None, logical=2, physical=2, allowed=(0, 1), numa=(NumaNode(0, (0, 1)),))

UUIDS = (
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932aaaa-0000-0000-0000-000000000001",
    "GPU-c08d91cb-e324-655c-71ba-7570956445bc",
    "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77",
)


def machine(gpus: Sequence[Gpu], *notes: str) -> Hardware:
    return Hardware(CPU, tuple(gpus), notes)


def nvidia(count: int = 4, driver: str = "570.86.15") -> list[Gpu]:
    return [Gpu("nvidia", index, "NVIDIA H100", uuid=UUIDS[index], driver=driver) for index in range(count)]


def of(vendor: str, count: int) -> list[Gpu]:
    return [Gpu(vendor, index, "GPU", pci=f"0000:{index}0:00.0") for index in range(count)]


def sliced(gpu: Gpu, *instances: tuple[int, int]) -> Gpu:
    """The GPU in MIG mode; an instance is (GPU instance, compute instance)."""
    return replace(
        gpu, mig=tuple(MigInstance(f"MIG-{gpu.index}{gi}{ci}", "MIG 1g.10gb", None, gi, ci) for gi, ci in instances)
    )


def tokens(visible: VisibleGpus) -> list[str]:
    return [device.token for device in visible.gpus]


def indices(visible: VisibleGpus) -> list[int]:
    return [device.gpu.index for device in visible.gpus]


def cuda(mask: str | None, gpus: Sequence[Gpu] | None = None, **environ: str) -> VisibleGpus:
    mask_variable = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    return visible_gpus(machine(nvidia() if gpus is None else gpus), None, {**mask_variable, **environ})


# CUDA_VISIBLE_DEVICES


def test_all_gpus_by_default() -> None:
    visible = cuda(None)
    assert tokens(visible) == list(UUIDS)
    assert visible.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert (visible.source, dict(visible.environ), visible.notes) == ("NVML", {}, ())


def amd() -> list[Gpu]:
    return [replace(gpu, uuid=f"GPU-{gpu.index:x}abbaabbaabbaabb") for gpu in of("amd", 4)]


CUDA, ROCR, HIP, ZE = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"

OF_CUDA = [
    # the mask, the GPUs that are seen, and where the list ends
    ("0", [0], None),
    ("2,1", [2, 1], None),  # the guide's example: device 2 comes before device 1
    (" 2 , 1 ", [2, 1], None),
    ("+1", [1], None),
    ("1gpu,2ampere", [1, 2], None),
    ("3,", [3], None),
    (UUIDS[2], [2], None),
    ("GPU-8932f", [0], None),
    ("GPU-c08d91cb,GPU-5d5ba0d6", [2, 3], None),
    ("GPU-c08d91cb,0", [2, 0], None),
    *((mask, [], None) for mask in ("", "-1", "NoDevFiles", "-1,0")),
    ("0,2,-1,1", [0, 2], None),  # the guide's other example
    ("0,9,1", [0], "9"),
    ("9", [], "9"),
    ("0,,1", [0], ""),
    ("1,all", [1], "all"),
    ("1,GPU-8932", [1], "GPU-8932"),  # begins two UUIDs
    ("GPU-", [], "GPU-"),
    ("MIG-00", [], "MIG-00"),
]

LEFT = [
    *(
        (nvidia(), {CUDA: mask}, seen, CUDA,
         "" if entry is None else f"{CUDA}={mask} is ignored from '{entry}' on: this machine has 4 GPUs, 0 to 3.")
        for mask, seen, entry in OF_CUDA
    ),
    *((nvidia(), {CUDA: mask}, [], CUDA, "twice") for mask in ("0,1,0", "0,GPU-8932f", "2, 2")),
    ([gpu for gpu in nvidia() if gpu.index != 2], {CUDA: "3,2"}, [3], CUDA,
     f"{CUDA}=3,2 is ignored from '2' on: this machine has 3 GPUs, 0, 1 and 3."),  # one was lost
    (amd(), {}, [0, 1, 2, 3], "KFD", ""),
    (amd(), {HIP: "2,0"}, [2, 0], HIP, ""),
    (amd(), {HIP: "GPU-3abba"}, [3], HIP, ""),
    (amd(), {HIP: "2,2,0"}, [2, 0], HIP, ""),
    (amd(), {CUDA: "1"}, [1], CUDA, ""),
    (amd(), {HIP: "3", CUDA: "1"}, [3], HIP, ""),
    (amd(), {HIP: ""}, [], HIP, ""),
    (amd(), {ROCR: "3, GPU-1ABBA"}, [3, 1], ROCR, ""),
    (amd(), {ROCR: ""}, [], ROCR, ""),
    (amd(), {ROCR: "3,1", HIP: "1"}, [1], f"{ROCR} and {HIP}", ""),
    (amd(), {ROCR: "1,1,2"}, [1], ROCR, f"{ROCR}=1,1,2 is ignored from the second 1 on."),
    # as a batch system may set them, wrongly
    (amd(), {ROCR: "1,3", CUDA: "1,3"}, [3], f"{ROCR} and {CUDA}",
     f"{CUDA}=1,3 is ignored from '3' on: {ROCR}=1,3 leaves 2 GPUs, 0 and 1 to it."),
    (amd(), {HIP: "0, 1"}, [0], HIP, "is ignored from ' 1' on"),
    (of("intel", 3), {}, [0, 1, 2], "sysfs", ""),
    (of("intel", 3), {ZE: ""}, [0, 1, 2], "sysfs", ""),
    (of("intel", 3), {ZE: "2,0"}, [0, 2], ZE, ""),
    (of("intel", 3), {ZE: "0,7"}, [0], ZE, "names 7, but this machine has 3 GPUs, 0 to 2."),
    (of("intel", 3), {"ONEAPI_DEVICE_SELECTOR": "level_zero:0"}, [0, 1, 2], "sysfs", "may hide more GPUs"),
]  # fmt: skip


@pytest.mark.parametrize(("gpus", "environ", "seen", "source", "note"), LEFT)
def test_variables_select_the_visible_gpus(
    gpus: list[Gpu], environ: dict[str, str], seen: list[int], source: str, note: str
) -> None:
    visible = visible_gpus(machine(gpus), None, environ)
    assert (indices(visible), visible.source) == (seen, source)
    torch = "xpu" if gpus[0].vendor == "intel" else "cuda"
    assert visible.devices == tuple(f"{torch}:{place}" for place in range(len(seen)))
    whole = note.startswith(tuple(environ))
    assert [each == note if whole else note in each for each in visible.notes if "alone" not in each] == [True] * bool(
        note
    )


def test_gpus_without_uuids_are_named_by_index() -> None:
    assert tokens(cuda("1,0", of("nvidia", 2))) == ["1", "0"]


def test_a_range_of_gpus() -> None:
    assert indices(visible_gpus(machine(of("nvidia", 4)), "3,0-2", {})) == [3, 0, 1, 2]


@pytest.mark.parametrize(
    ("mask", "order", "noted"),
    [
        (None, None, True),
        ("1,0", None, True),
        ("1,0", "FASTEST_FIRST", True),
        ("1,0", "PCI_BUS_ID", False),
        ("GPU-c08d", None, False),
    ],
)
def test_different_gpus_may_be_numbered_otherwise(mask: str | None, order: str | None, noted: bool) -> None:
    gpus = nvidia()
    gpus[3] = replace(gpus[3], name="NVIDIA T400")
    visible = cuda(mask, gpus, **({"CUDA_DEVICE_ORDER": order} if order else {}))
    assert ["PCI_BUS_ID" in note for note in visible.notes] == [True] * noted


# MIG


def test_mig_instances_by_uuid() -> None:
    gpus = [sliced(nvidia()[0], (1, 0), (2, 0)), nvidia()[1]]
    visible = cuda("MIG-020,MIG-010,1", gpus)
    assert tokens(visible) == ["MIG-020", "MIG-010", UUIDS[1]]
    assert visible.gpus[0].mig is gpus[0].mig[1]
    assert visible.devices == ("cuda:0", "cuda:1", "cuda:2")
    assert visible.notes == ()


def test_mig_instances_as_drivers_before_470_name_them() -> None:
    gpus = [nvidia()[0], sliced(nvidia()[1], (1, 0), (2, 3))]
    assert tokens(cuda(f"MIG-{UUIDS[1]}/2/3", gpus)) == ["MIG-123"]


def test_a_whole_gpu_in_mig_mode_is_one_compute_instance_of_each_gpu_instance() -> None:
    gpus = [sliced(nvidia()[0], (1, 0), (1, 1), (2, 0)), nvidia()[1]]
    for visible in (cuda(None, gpus), cuda("0,1", gpus)):
        assert tokens(visible) == ["MIG-010", "MIG-020", UUIDS[1]]
        (note,) = visible.notes
        assert note.startswith("CUDA shows one compute instance of each GPU instance, so 3 of 4 are used")


@pytest.mark.parametrize("driver", ["535.129.03", None])
def test_older_drivers_show_one_mig_instance_and_nothing_else(driver: str | None) -> None:
    gpus = [replace(gpu, driver=driver) for gpu in (nvidia()[0], sliced(nvidia()[1], (1, 0), (2, 0)))]
    for visible in (cuda(None, gpus), cuda("0,1", gpus), cuda("0,MIG-110,MIG-120", gpus)):
        assert tokens(visible) == ["MIG-110"]
        (note,) = visible.notes
        assert "shows a process one MIG instance and nothing else, so 1 of 3 are used" in note


def test_one_mig_instance_is_nothing_to_note() -> None:
    gpus = [sliced(nvidia(driver="535.129.03")[0], (1, 0), (2, 0))]
    assert cuda("MIG-020", gpus).notes == ()


def test_tiles_joined_by_the_environment_are_noted() -> None:
    tiles = [Gpu("intel", tile, f"Intel GPU 0bd5 tile {tile}", pci="0000:29:00.0") for tile in (0, 1)]
    composite = {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
    assert "makes the tiles" in visible_gpus(machine(tiles), None, composite).notes[0]
    assert visible_gpus(machine(of("intel", 2)), None, composite).notes == ()


@pytest.mark.parametrize(("vendor", "backend"), [("nvidia", "nccl"), ("amd", "nccl"), ("intel", "xccl")])
def test_the_backend_of_each(vendor: str, backend: str) -> None:
    for wanted in None, "0":
        assert visible_gpus(machine(of(vendor, 1)), wanted, {}).backend == backend


# No GPUs, and several vendors


def test_no_gpus() -> None:
    assert visible_gpus(machine([]), None, {"CUDA_VISIBLE_DEVICES": ""}) == VisibleGpus((), "no GPU found")


def test_masks_without_gpus_are_noted_once() -> None:
    visible = visible_gpus(machine([]), None, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert visible.notes == ("CUDA_VISIBLE_DEVICES=0,1 is set, but no GPU was found.",)
    of_slurm = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "0")
    assert visible_gpus(machine([]), None, of_slurm).notes == (
        "CUDA_VISIBLE_DEVICES=0, ROCR_VISIBLE_DEVICES=0 and ZE_AFFINITY_MASK=0 are set, but no GPU was found.",
    )


def test_no_gpus_on_purpose() -> None:
    assert visible_gpus(machine([]), "none", {"CUDA_VISIBLE_DEVICES": "0"}).notes == ()
    for gpus in (nvidia(), amd()):
        chosen = visible_gpus(machine(gpus), "none", {})
        assert (chosen.gpus, chosen.source) == ((), "--gpus none")
        assert visible_gpus(machine(gpus), None, chosen.environ).gpus == ()


def test_nvidia_comes_before_the_integrated_graphics_of_an_amd_processor() -> None:
    visible = visible_gpus(machine([*of("amd", 1), *nvidia(2)]), None, {})
    assert [device.gpu.vendor for device in visible.gpus] == ["nvidia", "nvidia"]


# --gpus

PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

CHOSEN = [
    # Programs read integers in the variable, so UUIDs are there only where a user typed one
    *((nvidia(), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, wanted, seen, {CUDA: mask, **PCI_ORDER}, "")
      for wanted, seen, mask in (("0,2", [0, 2], "0,2"), ("3,0", [3, 0], "3,0"), (" 1 , 2", [1, 2], "1,2"))),
    (nvidia(), {}, "gpu-C08D", [2], {CUDA: UUIDS[2]}, ""),
    (nvidia(), {}, "GPU-8932f,3", [0, 3], {CUDA: f"{UUIDS[0]},{UUIDS[3]}"}, ""),
    # or where CUDA would count otherwise: one was lost, or is in MIG mode, with an instance or without
    *((gpus, {}, "3,2", [3, 2], {CUDA: f"{UUIDS[3]},{UUIDS[2]}"}, "") for gpus in (
        [gpu for gpu in nvidia() if gpu.index != 1],
        [sliced(nvidia()[0], (1, 0)), *nvidia()[1:]],
        [replace(nvidia()[0], mig_mode=True), *nvidia()[1:]],
    )),
    (of("nvidia", 3), {}, "2,1", [2, 1], {CUDA: "2,1", **PCI_ORDER}, ""),
    (nvidia(), {CUDA: "0,1"}, "1", [1], {CUDA: "1", **PCI_ORDER}, ""),
    (nvidia(), {CUDA: "0,1"}, "1,3", [1, 3], {CUDA: "1,3", **PCI_ORDER},
     f"--gpus 1,3 overrides {CUDA}=0,1, which lacks some of them."),
    (amd(), {}, "3,1", [3, 1], {HIP: "3,1"}, ""),
    (amd(), {CUDA: "0"}, "2", [2], {HIP: "2"}, f"--gpus 2 overrides {CUDA}=0, which lacks some of them."),
    (amd(), {ROCR: "0,1", HIP: "1"}, "3,GPU-1", [3, 1], {ROCR: "3,1", HIP: "0,1"},
     f"--gpus 3,GPU-1 overrides {ROCR}=0,1 and {HIP}=1, which lacks some of them."),
    (amd(), {ROCR: "0,2", CUDA: "1"}, "3,1", [3, 1], {ROCR: "3,1", HIP: "0,1"}, "overrides"),
    (of("intel", 3), {}, "2,0", [0, 2], {ZE: "0,2", "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}, "cannot reorder"),
    (of("intel", 4), {ZE: "0"}, "1,3", [1, 3], {ZE: "1,3", "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}, "overrides"),
]  # fmt: skip


@pytest.mark.parametrize(("gpus", "inherited", "wanted", "seen", "environ", "note"), CHOSEN)
def test_gpus_flag(
    gpus: list[Gpu], inherited: dict[str, str], wanted: str, seen: list[int], environ: dict[str, str], note: str
) -> None:
    visible = visible_gpus(machine(gpus), wanted, inherited)
    assert (indices(visible), visible.environ, visible.source) == (seen, environ, "--gpus")
    whole = note.startswith("--gpus")
    notes = [each for each in visible.notes if "alone; for" not in each]  # of one GPU, as if it were a number of ranks
    assert [each == note if whole else note in each for each in notes] == [True] * bool(note)
    assert indices(visible_gpus(machine(gpus), None, {**inherited, **environ})) == seen, "so do the ranks"


@pytest.mark.parametrize(
    ("mask", "names"), [(None, ["0", "1"]), ("1,0", ["1", "0"]), ("GPU-c08d,0", [UUIDS[2], UUIDS[0]])]
)
def test_a_rank_that_sees_only_its_own_gpu(mask: str | None, names: list[str]) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    each = single_device_environments(visible_gpus(machine(nvidia()), None, environ), environ)
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in each][:2] == names
    assert {"CUDA_DEVICE_ORDER" in variables for variables in each} == {names[0].isdecimal()}


@pytest.mark.parametrize(("wanted", "is_noted"), [("2", True), ("1", False), ("2,3", False), ("0-2", False)])
def test_a_single_index_may_be_meant_as_a_number(wanted: str, is_noted: bool) -> None:
    note = f"--gpus {wanted} is GPU {wanted} alone; for {wanted} ranks: --nproc {wanted}"
    assert (note in visible_gpus(machine(nvidia()), wanted, {}).notes) is is_noted


def test_gpus_flag_with_mig() -> None:
    gpus = [sliced(nvidia()[0], (1, 0), (2, 0)), nvidia()[1]]
    visible = visible_gpus(machine(gpus), "MIG-02,1", {})
    assert visible.environ == {"CUDA_VISIBLE_DEVICES": f"MIG-020,{UUIDS[1]}"}
    assert tokens(visible_gpus(machine(gpus), "0", {})) == ["MIG-010", "MIG-020"]
    assert tokens(visible_gpus(machine(gpus), "mig", {})) == ["MIG-010", "MIG-020"]
    assert visible_gpus(machine(gpus), "mig,1", {}).environ == {"CUDA_VISIBLE_DEVICES": f"MIG-010,MIG-020,{UUIDS[1]}"}


@pytest.mark.parametrize(
    ("wanted", "message", "hint"),
    [
        ("9", "--gpus 9: this machine has 4 GPUs, 0 to 3", "`ddplaunch devices` lists them"),
        ("0,1,0", "--gpus 0,1,0: 0 is named twice", "name each GPU once"),
        ("0,GPU-8932f9", "--gpus 0,GPU-8932f9: GPU-8932f9 is named twice", "name each GPU once"),
        ("GPU-8932", "--gpus GPU-8932: GPU-8932 matches 2 UUIDs", "give more of the UUID"),
        ("GPU-ffff", f"--gpus GPU-ffff: {NO_SUCH_GPU} GPU-ffff", "give indices, "),
        ("mig", "--gpus mig: no GPU of this machine has MIG instances", "`ddplaunch devices` lists them"),
        ("3-0", "--gpus 3-0: 3 is more than 0", "--gpus 0-3"),
        ("-1", f"--gpus -1: {NO_SUCH_GPU} -1", "give indices, "),
        ("MIG-1", f"--gpus MIG-1: {NO_SUCH_GPU} MIG-1", "give indices, "),
        ("0,,1", "--gpus 0,,1: an entry is empty", "give indices, "),
        ("٣", f"--gpus ٣: {NO_SUCH_GPU} ٣", "give indices, "),
        ("", "--gpus names no GPU", "give indices, "),
    ],
)
def test_gpus_flag_that_makes_no_sense(wanted: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        visible_gpus(machine(nvidia()), wanted, {})
    assert raised.value.message == message
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(hint)


@pytest.mark.parametrize(("count", "have"), [(1, "1 GPU, 0"), (2, "2 GPUs, 0 and 1")])
def test_small_machines_are_counted_in_users_units(count: int, have: str) -> None:
    with pytest.raises(UsageError, match=f"this machine has {have}\n"):
        visible_gpus(machine(nvidia(count)), "7", {})


@pytest.mark.parametrize(
    ("notes", "hint"),
    [((), "`ddplaunch devices` lists them"), (("The NVIDIA driver …",), "The NVIDIA driver …")],
)
def test_gpus_flag_on_a_machine_without(notes: tuple[str, ...], hint: str) -> None:
    with pytest.raises(UsageError, match="--gpus 0: no GPU was found on this machine") as raised:
        visible_gpus(machine([], *notes), "0", {})
    assert raised.value.hint == hint
