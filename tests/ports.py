"""Ports for the jobs of tests."""

from __future__ import annotations

import itertools
import os
import socket
from collections import deque

_PORTS = itertools.count(20000 + os.getpid() * 8 % 10000, 2)
_held: deque[socket.socket] = deque(maxlen=32)  # of the ports given last: tests run in several processes at a time


def free_port() -> int:
    """A port whose successor is free too, outside the range from which the kernel gives ports by itself."""
    for port in _PORTS:
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0a port of ddplaunch's tests: {port}")  # for as long as this process has it open
            for number in (port, port + 1):
                socket.create_server(("", number)).close()
        except OSError:
            mark.close()
            continue
        _held.append(mark)
        return port
    raise AssertionError
