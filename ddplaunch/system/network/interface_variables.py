"""Finds mistakes in the variables with which gloo, NCCL, TensorPipe, UCX and libfabric choose networks."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping

_EXACT = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_NCCL = "NCCL_SOCKET_IFNAME"
_PREFIXES = ("FI_", "GLOO_", "NCCL_", "TP_", "UCX_")


def find_unknown_interfaces(environ: Mapping[str, str], interfaces: Collection[str] = ()) -> list[str]:
    """List the variables that name no interface of this machine: "GLOO_SOCKET_IFNAME=eth7".

    gloo and TensorPipe take exact names, several with commas (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). NCCL
    takes prefixes; "=" before them makes them exact, "^" excludes (NCCL's user guide, NCCL_SOCKET_IFNAME).

    Args:
        environ: the environment of the ranks.
        interfaces: those of the machine; () reads them.
    """
    unknown = []
    for variable in (*_EXACT, _NCCL):
        value = environ.get(variable, "")
        if not value or value.startswith("^"):
            continue
        known = interfaces or [name for _, name in socket.if_nameindex()]
        names = value.removeprefix("=").split(",")
        by_prefix = variable == _NCCL and not value.startswith("=")
        if not any(each == name or (by_prefix and each.startswith(name)) for name in names for each in known):
            unknown.append(f"{variable}={value}")
    return unknown


def read_network_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in ``environ`` that configure gloo, NCCL, TensorPipe, UCX or libfabric."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(_PREFIXES)}
