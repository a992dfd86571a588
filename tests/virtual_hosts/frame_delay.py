"""A slow cable: forwards Ethernet frames between two TAP devices after a delay.

Many kernels have no netem. Run as ``frame_delay.py MILLISECONDS TAP TAP PIDFD`` in the network namespace of the
switch; it prints "ready" when the devices are there, and ends, and they with it, when the process of the pidfd does.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def open_tap(name: str) -> int:
    """Make a TAP device, which is there as long as it is open."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


def carry(one: int, other: int, delay: float, until: int) -> None:
    """Carry frames both ways until the process ends that ``until`` is a pidfd of."""
    across = {one: other, other: one}
    waiting: deque[tuple[float, int, bytes]] = deque()
    poll = select.poll()
    for fd in (one, other, until):
        poll.register(fd, select.POLLIN)
    while True:
        while waiting and waiting[0][0] <= time.monotonic():
            _, fd, frame = waiting.popleft()
            try:
                os.write(fd, frame)
            except OSError:
                pass  # the device is down or full: the frame is lost, as on a cable
        timeout = max(0.0, waiting[0][0] - time.monotonic()) * 1000 if waiting else None
        for fd, _ in poll.poll(timeout):
            if fd == until:
                return
            try:
                frame = os.read(fd, 65536)
            except OSError:
                continue  # the device is still down
            waiting.append((time.monotonic() + delay, across[fd], frame))


def main() -> None:
    milliseconds, one, other, until = sys.argv[1:]
    taps = open_tap(one), open_tap(other)
    os.write(1, b"ready\n")
    carry(*taps, float(milliseconds) / 1000, int(until))


if __name__ == "__main__":
    main()
