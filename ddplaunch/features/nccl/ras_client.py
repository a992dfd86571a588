"""Queries the state of a job from NCCL's RAS service, which has a TCP port on this machine, from NCCL 2.24 on.

The protocol is text (NVIDIA's NCCL user guide, "RAS"): one command in a line; the reply to STATUS ends with
the connection. From 2.28.7 on the reply can be JSON; older services reject the command for JSON, and reply with text.

All NCCL processes of a user on one machine share the port (SO_REUSEPORT), also those of other jobs: the kernel chooses
a process for each connection. So the service is asked again after a reply about other ranks, or after no reply.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

from ddplaunch.features.nccl.ras_report import RasReport, parse_reply

DEFAULT_ADDRESS = "localhost:28028"
ADDRESS_VARIABLE, ENABLE_VARIABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"

_COMMANDS = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n"
_CONNECT_TIMEOUT_S = 0.5  # also for the first line of the reply: a process that is stopped sends none
_MAX_REPLY_BYTES = 32 << 20  # a rank takes some 500
_MAX_ATTEMPTS = 8


def find_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the service; None if it is turned off, or NCCL_RAS_ADDR is malformed."""
    if environ.get(ENABLE_VARIABLE, "1").strip() == "0":
        return None
    host, _, port = (environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS).rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() and 0 < int(port) < 1 << 16 else None


def ask_service(address: tuple[str, int], deadline: float, is_ours: Callable[[RasReport], bool]) -> RasReport | None:
    """Return the RAS service's report on our job; None if it sends none before ``deadline`` (monotonic)."""
    for _ in range(_MAX_ATTEMPTS):
        if time.monotonic() >= deadline:
            break
        try:
            report = parse_reply(_query_once(address, deadline))
        except TimeoutError:
            continue
        except (OSError, ValueError):
            break
        if is_ours(report):
            return report
    return None


def _query_once(address: tuple[str, int], deadline: float) -> bytes:
    with socket.create_connection(address, _CONNECT_TIMEOUT_S) as connection:
        connection.sendall(_COMMANDS)
        reply = bytearray()
        while data := connection.recv(1 << 16):
            reply += data
            left_s = deadline - time.monotonic()
            if left_s <= 0 or len(reply) > _MAX_REPLY_BYTES:
                raise TimeoutError
            connection.settimeout(left_s)
    return bytes(reply)
