"""A slow cable: forwards Ethernet frames between two TAP devices after a delay, as many kernels have no netem.

Run as ``frame_delay.py MILLISECONDS TAP TAP PIDFD`` in the network namespace of the switch; it prints "ready" when the
devices exist, and ends, which removes them, when the process of the pidfd ends.
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
    """Make a TAP device, which exists as long as it is open."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


def forward_frames(one: int, other: int, delay: float, pidfd: int) -> None:
    """Forward frames in both directions until the process of the pidfd ends."""
    across = {one: other, other: one}
    waiting: deque[tuple[float, int, bytes]] = deque()
    poll = select.poll()
    for fd in (one, other, pidfd):
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
            if fd == pidfd:
                return
            try:
                frame = os.read(fd, 65536)
            except OSError:
                continue  # the device is still down
            waiting.append((time.monotonic() + delay, across[fd], frame))


def main() -> None:
    milliseconds, one, other, pidfd = sys.argv[1:]
    taps = open_tap(one), open_tap(other)
    os.write(1, b"ready\n")
    forward_frames(*taps, float(milliseconds) / 1000, int(pidfd))


if __name__ == "__main__":
    main()
