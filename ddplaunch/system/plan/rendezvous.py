"""Rendezvous of the ranks: address and port of the store, init method, backend."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping

from msgspec import Struct

from ddplaunch.base.errors import UsageError
from ddplaunch.system.plan.numbers import parse_int

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torchrun's; for several nodes without --master-port
ADDRESS_PLACEHOLDER = "NODE0"  # printed by a dry run without node 0's address
SOURCE_ASSUMED, SOURCE_MISSING = "assumed", "missing"
"""Sources of values that were not given: enough for a dry run, but not to start one node of several."""

_PORTS = range(1, 65536)
_TCP = r"tcp://(?P<host>[^/:\[\]]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,9})"
_HOST = r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?"
_MAX_LABEL = 63  # letters between two dots (RFC 1035): a longer name never resolves


class SourcedValue(Struct, frozen=True):
    """A value and its source ("--master-addr", "MASTER_ADDR", "assumed")."""

    value: str
    source: str


def locate_store(
    address: str | None,
    port: int | None,
    init_method: str | None,
    *,
    nnodes: int,
    here: str | None,
    environ: Mapping[str, str],
) -> tuple[SourcedValue, SourcedValue]:
    """Return address and port of the store. On one node it is on loopback, on any free port (0).

    Args:
        address, port, init_method: the options; with several nodes, MASTER_ADDR and MASTER_PORT are read too.
        here: this machine's name, if it is node 0.

    Raises UsageError if an address or port is invalid, or they contradict each other.
    """
    if init_method and (method := re.fullmatch(_TCP, init_method)):
        method_address, method_port = method["host"].strip("[]"), method["port"]
        contradicting = [f"--master-addr {address}"] if address not in (None, method_address) else []
        contradicting += [f"--master-port {port}"] if port not in (None, int(method_port)) else []
        if contradicting:
            message = f"--init-method {init_method} and {' '.join(contradicting)} contradict each other"
            raise UsageError(message, "give the address once")
        return _validate_address(method_address, "--init-method"), _validate_port(method_port, "--init-method")
    several = nnodes > 1
    if address is not None:
        where = _validate_address(address, "--master-addr")
    elif several and environ.get("MASTER_ADDR"):
        where = _validate_address(environ["MASTER_ADDR"], "MASTER_ADDR")
    elif several:
        where = SourcedValue(here, SOURCE_ASSUMED) if here else SourcedValue(ADDRESS_PLACEHOLDER, SOURCE_MISSING)
    else:
        where = SourcedValue(LOOPBACK, "one node")
    if port == 0 and several:
        raise UsageError("--master-port 0: several nodes must agree on a port", f"--master-port {DEFAULT_PORT}")
    if port:
        return where, _validate_port(str(port), "--master-port")
    if several and environ.get("MASTER_PORT"):
        return where, _validate_port(environ["MASTER_PORT"], "MASTER_PORT")
    return where, SourcedValue(str(DEFAULT_PORT), SOURCE_ASSUMED) if several else SourcedValue("0", "any free port")


def _validate_port(text: str, source: str) -> SourcedValue:
    if (port := parse_int(text)) not in _PORTS:
        example = f"tcp://host:{DEFAULT_PORT}" if source == "--init-method" else f"--master-port {DEFAULT_PORT}"
        raise UsageError(f"{source} {text}: expected a port from 1 to 65535", example)
    return SourcedValue(str(port), source)


def _validate_address(text: str, source: str) -> SourcedValue:
    text = text[1:-1] if text.startswith("[") and text.endswith("]") else text  # torchrun's form of IPv6 addresses
    is_name = re.fullmatch(_HOST, text) and all(len(label) <= _MAX_LABEL for label in text.split("."))
    if not is_name or re.fullmatch(r"[\d.]+", text):
        try:
            ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            raise UsageError(f"{source} {text} is not a host name or address", "--master-addr 10.0.0.1") from None
    return SourcedValue(text, source)


def check_init_method(method: str | None) -> None:
    """Check the form of ``--init-method``, and that its file can be created. Raises UsageError."""
    if method is None or method == "env://" or re.fullmatch(_TCP, method):
        return
    if not method.startswith("file://"):
        raise UsageError(f"unknown --init-method {method}", "known: env://, tcp://host:port, file:///path")
    path = method.removeprefix("file://")
    folder = os.path.dirname(path)
    example = "--init-method file:///tmp/store"
    if not path.startswith("/"):
        raise UsageError(f"--init-method {method}: the path must be absolute", example)
    if os.path.isdir(path):
        raise UsageError(f"--init-method {method}: {path} is a folder", f"--init-method {method.rstrip('/')}/store")
    if not os.path.isdir(folder):
        raise UsageError(f"--init-method {method}: folder {folder} does not exist", f"create it, or {example}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"--init-method {method}: {path} is not writable", example)


def check_store_file(method: str | None, run_id: str) -> None:
    """Test writing next to the file of ``--init-method``, as root passes permission checks. Raises UsageError."""
    if method is None or not method.startswith("file://"):
        return
    probe = os.path.join(os.path.dirname(method.removeprefix("file://")), f".{run_id}.{os.getpid()}")
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.unlink(probe)
    except OSError as error:
        message = f"--init-method {method} cannot be written: {error.strerror}"
        raise UsageError(message, "--init-method file:///tmp/store") from None


def choose_backend(requested: str | None, init_method: str | None, device_backend: str) -> str | None:
    """Return the backend of the process group that ddplaunch initializes; None if the program does that.

    ``requested`` is ``--backend``; "auto", or None with an init method, is ``device_backend``, that of rank 0's device.
    Raises UsageError if a backend is missing, or there are several without a device for each (torch's BackendConfig).
    """
    if requested is None and init_method is None:
        return None
    if requested not in (None, "auto"):
        parts = requested.lower().split(",")
        if any(not word for part in parts for word in part.split(":")):
            what = f"--backend {requested}: a device or a backend is empty"
            raise UsageError(what, "--backend gloo, or cpu:gloo,cuda:nccl")
        devices = {part.partition(":")[0] for part in parts}
        if len(parts) > 1 and (len(devices) < len(parts) or not all(":" in part for part in parts)):
            raise UsageError(f"--backend {requested} needs a device for each backend", "--backend cpu:gloo,cuda:nccl")
        return requested.lower()
    return device_backend


def uses_nccl(backend: str | None) -> bool:
    """Whether NCCL is the backend or a part of it, as in "cpu:gloo,cuda:nccl"."""
    return "nccl" in [part.rpartition(":")[2] for part in (backend or "").split(",")]
