"""Check of ``--thorough``: InfiniBand ports, NVLinks, their error counters, and GPU errors in the kernel log (Xids)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from ddplaunch.base.text import format_count, format_elapsed
from ddplaunch.base.types import Count, Name, NonNegativeFloat, Size, TextLine
from ddplaunch.core.net.addresses import list_networks
from ddplaunch.features.doctor.checks import CheckContext, FactReader, Finding, Findings, HealthCheck, Severity
from ddplaunch.features.doctor.checks.kernel import list_dir
from ddplaunch.features.doctor.probe import REPLY_TIMEOUT_S, HelperProbe
from ddplaunch.system.devices import read_hardware
from ddplaunch.system.devices.gpu_health import NvLinks, read_nvlinks
from ddplaunch.system.devices.sysfs import read_int, read_text

if TYPE_CHECKING:
    from ddplaunch.features.doctor.node_facts import NodeFacts

_ERROR_COUNTERS = {
    "symbol_error": "symbol errors",
    "link_error_recovery": "recoveries of the link",
    "link_downed": "times that the link went down",
    "port_rcv_errors": "packets received with errors",
    "local_link_integrity_errors": "local integrity errors",
}
"""Files of sysfs, in ports/N/counters (Documentation/ABI/stable/sysfs-class-infiniband)."""

_XID = re.compile(r"\d+,\d+,(\d{1,18}),[^;]*;.*NVRM: Xid \(PCI:([0-9A-Fa-f:.]{4,20})\): (\d{1,5})")
"""A record of the kernel log, with microseconds since boot (Documentation/ABI/testing/dev-kmsg)."""

_PROGRAM_XIDS = (13, 31, 43, 45)  # Xids that a program causes
_XID_MEANINGS = {
    13: "a program's exception",
    31: "a program used an invalid address",
    43: "a program's fault",
    45: "cleaned up after a program",
    48: "a memory error that ECC could not correct",
    63: "a row of memory was replaced",
    64: "a row of memory could not be replaced",
    74: "an NVLink error",
    79: "it fell off its bus",
    92: "many memory errors that ECC corrected",
    94: "a memory error, contained",
    95: "a memory error, not contained",
    119: "its system processor (GSP) did not answer",
    120: "an error of its system processor (GSP)",
}
"""The most common ones of NVIDIA's "XID Errors"."""


class IbPort(Struct, frozen=True):
    """A port of an InfiniBand or RoCE adapter."""

    name: TextLine  # "mlx5_0 port 1"
    state: TextLine  # "ACTIVE"
    physical: TextLine  # "LinkUp"
    rate: TextLine  # "400 Gb/sec (4X NDR)"


class ErrorCount(Struct, frozen=True):
    """An error counter that is not 0."""

    where: TextLine  # "mlx5_0 port 1", "GPU 2"
    what: TextLine
    count: Size


class Xid(Struct, frozen=True):
    """An error that the GPU driver has written to the kernel log."""

    pci: TextLine
    number: Count
    count: Count
    ago: NonNegativeFloat  # seconds since the last one


class NetworkAddress(Struct, frozen=True):
    """A network interface of this machine, its address and network."""

    interface: Name
    address: Name
    network: Name  # "10.0.0.0/24"


class Fabric(Struct, frozen=True):
    """All facts of this check."""

    attachments: tuple[NetworkAddress, ...]
    ports: tuple[IbPort, ...]
    nvlinks: tuple[NvLinks, ...]
    errors: tuple[ErrorCount, ...]
    xids: tuple[Xid, ...]


def _read(context: CheckContext) -> FactReader:
    probe = HelperProbe.for_function(read_fabric) if context.thorough else None
    return lambda: {"fabric": probe and probe.read_result(Fabric, REPLY_TIMEOUT_S)}


def read_in_child() -> Fabric | None:
    """Read the facts in a helper process; None if a driver does not answer."""
    return HelperProbe.for_function(read_fabric).read_result(Fabric, REPLY_TIMEOUT_S)


def read_fabric(sysfs: str = "/sys", kernel_log: str = "/dev/kmsg") -> Fabric:
    """Read all facts."""
    nvlinks = read_nvlinks(read_hardware().gpus)
    ports, errors = (
        [],
        [ErrorCount(f"GPU {links.gpu}", f"NVLink {what}", count) for links in nvlinks for what, count in links.errors],
    )
    for name, folder in _port_folders(f"{sysfs}/class/infiniband"):
        state, physical, rate = (read_text(f"{folder}/{each}") or "" for each in ("state", "phys_state", "rate"))
        ports.append(IbPort(name, state.rpartition(": ")[2], physical.rpartition(": ")[2], rate))
        for file, what in _ERROR_COUNTERS.items():
            if count := read_int(f"{folder}/counters/{file}"):
                errors.append(ErrorCount(name, what, count))
    attachments = tuple(NetworkAddress(*each) for each in list_networks())
    return Fabric(attachments, tuple(ports), nvlinks, tuple(errors), tuple(_read_xids(kernel_log)))


def _port_folders(folder: str) -> Iterator[tuple[str, str]]:
    for device in list_dir(folder):
        for port in list_dir(f"{folder}/{device}/ports"):
            yield f"{device} port {port}", f"{folder}/{device}/ports/{port}"


def _read_xids(path: str) -> Iterator[Xid]:
    """Read Xids from the kernel log, if this user may read it."""
    found: dict[tuple[str, int], list[float]] = {}
    for line in _read_kernel_log(path):
        if xid := _XID.match(line):
            found.setdefault((xid[2], int(xid[3])), []).append(int(xid[1]) / 1e6)
    now = time.monotonic()
    for (pci, number), stamps in found.items():
        yield Xid(pci, number, len(stamps), max(0.0, now - max(stamps)))


def _read_kernel_log(path: str) -> Iterator[str]:
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while True:
            try:
                data = os.read(log, 1 << 16)
            except BrokenPipeError:  # this record was overwritten
                continue
            except OSError:
                return
            if not data:
                return
            yield from data.decode(errors="replace").split("\n")
    finally:
        os.close(log)


def _find_problems(name: str, facts: NodeFacts) -> Findings:
    if facts.fabric is None:
        return
    for port in facts.fabric.ports:
        if port.state == "INIT":
            text = f"{port.name} waits for a subnet manager (INIT)"
            yield Finding(Severity.WARNING, name, text, "start opensm, or the subnet manager of the switch")
        elif port.state != "ACTIVE":
            text = f"{port.name} is not active: {port.state or 'unknown'} ({port.physical or 'unknown'})"
            yield Finding(Severity.NOTE, name, text, "if it should be used, check its cable and switch port")
    for links in facts.fabric.nvlinks:
        if links.active and links.down:
            text = f"{links.down} of {links.active + links.down} NVLinks are down"
            hint = "see `nvidia-smi nvlink -s`, and reset the GPU; if they stay down, replace it"
            yield Finding(Severity.WARNING, f"{name} GPU {links.gpu}", text, hint)
    by_port: dict[str, list[str]] = {}
    for error in facts.fabric.errors:
        by_port.setdefault(error.where, []).append(f"{error.count} {error.what}")
    for where, counts in by_port.items():
        text = f"{', '.join(counts)} since its counters were cleared"
        yield Finding(Severity.NOTE, f"{name} {where}", text, "run the doctor again later: do they increase?")
    for xid in facts.fabric.xids:
        times = "once" if xid.count == 1 else f"{xid.count} times, last"
        meaning = f" ({_XID_MEANINGS[xid.number]})" if xid.number in _XID_MEANINGS else ""
        severity = Severity.NOTE if xid.number in _PROGRAM_XIDS else Severity.WARNING
        text = f"Xid {xid.number}{meaning} {times} {format_elapsed(xid.ago)} ago (kernel log)"
        yield Finding(severity, f"{name} GPU at {xid.pci}", text, "see NVIDIA's page on Xid errors for what to do")


def new_errors(name: str, before: Fabric, after: Fabric) -> Findings:
    """Report errors that occurred between two readings."""
    known = {(error.where, error.what): error.count for error in before.errors}
    for error in after.errors:
        new = error.count - known.get((error.where, error.what), 0)
        if new > 0:
            text = f"{new} {error.what} while all_reduce ran"
            yield Finding(
                Severity.WARNING, f"{name} {error.where}", text, "clean or replace the cable; then the adapter"
            )


def slower_ports(fabrics: Mapping[str, Fabric]) -> Findings:
    """Report ports with a lower rate than those of the same name on other nodes."""
    rates: dict[str, dict[str, float]] = {}
    for name, fabric in fabrics.items():
        for port in fabric.ports:
            if port.state == "ACTIVE" and (rate := re.match(r"\d{1,6}(\.\d+)?(?= Gb/sec)", port.rate)):
                rates.setdefault(port.name, {})[name] = float(rate[0])
    for port_name, by_node in rates.items():
        best = max(by_node.values())
        for name, value in by_node.items():
            if value < best:
                text = f"{port_name} runs at {value:g} Gb/s, on other nodes at {best:g}"
                yield Finding(Severity.WARNING, name, text, "check its cable, and the settings of the switch port")


def _summarize_ports(facts: NodeFacts) -> str | None:
    if facts.fabric is None or not facts.fabric.ports:
        return None
    rates = [port.rate for port in facts.fabric.ports if port.state == "ACTIVE"]
    by_rate = [f"{format_count(rates.count(rate), 'port')} at {rate}" for rate in dict.fromkeys(rates)]
    return ", ".join(by_rate) or "no port is active"


CHECK = HealthCheck(_read, _find_problems, {"ports": _summarize_ports})
