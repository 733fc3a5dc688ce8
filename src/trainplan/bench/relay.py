"""A link with a rate and a delay between two network namespaces: every packet passes through this process.

    python relay.py NAMESPACE:DEVICE NAMESPACE:DEVICE BYTES_PER_SECOND DELAY_SECONDS

It opens a TUN device in each, says "ready", and hands packets over: each direction sends one packet after the other at
the rate, and each packet arrives the delay later. Started by `slow_link.py`, as a file: it imports nothing of the rest,
so that it is there at once.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
LONGEST = 65_536  # bytes of a packet
AT_ONCE = 32  # packets that are taken from one side before the other has its turn


def tun(namespace: str, device: str) -> int:
    """A new TUN device in a namespace."""
    place = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(place, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.close(place)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return file


def relay(sides: list[int], rate: float, delay: float) -> None:
    """Hand packets over for ever."""
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # by the side they came from: when due, and what
    free = [0.0, 0.0]  # when each direction has sent what it has
    while True:
        now = time.monotonic()
        for side, packets in enumerate(waiting):
            while packets and packets[0][0] <= now:
                with contextlib.suppress(OSError):  # a full queue drops it, as a switch does; TCP sends it again
                    os.write(sides[1 - side], packets.popleft()[1])
        due = min((packets[0][0] for packets in waiting if packets), default=None)
        readable, _, _ = select.select(sides, [], [], None if due is None else max(0.0, due - time.monotonic()))
        for file in readable:
            side = sides.index(file)
            for _ in range(AT_ONCE):
                try:
                    packet = os.read(file, LONGEST)
                except BlockingIOError:
                    break
                free[side] = max(time.monotonic(), free[side]) + len(packet) / rate
                waiting[side].append((free[side] + delay, packet))


def main() -> None:
    first, second, rate, delay = sys.argv[1:]
    sides = [tun(*side.split(":")) for side in (first, second)]
    print("ready", flush=True)
    relay(sides, float(rate), float(delay))


if __name__ == "__main__":
    main()
