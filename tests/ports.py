"""Ports for the jobs of tests."""

from __future__ import annotations

import itertools
import os
import socket

_PORTS = itertools.count(20000 + os.getpid() * 8 % 10000, 2)


def free_port() -> int:
    """A port whose successor is free too, outside the range from which the kernel gives ports by itself."""
    for port in _PORTS:
        try:
            for number in (port, port + 1):
                socket.create_server(("", number)).close()
        except OSError:
            continue
        return port
    raise AssertionError
