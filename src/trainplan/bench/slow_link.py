"""Two network namespaces of this machine with a slow link between them: a cluster of two machines, for measurements.

Processes that are started inside `link.place(rank, world)` live in one of the two, the first half of the ranks in the
first; they talk to those of the other half only through the link.

    with slow_link(rate=125e6) as link, placed(link.place):       # 1 Gbit/s
        pool(2).run(...)

Without a delay the kernel's token bucket (`tc … tbf`) holds a pair of virtual Ethernet devices to the rate. It lets
short messages pass in a burst, and this kernel may have no way to delay packets; so with a delay they pass through a
process of ours (`relay.py`), which holds to both. Making namespaces needs root.

What passes is TCP, so whoever decides how much of it may be on its way decides, too, whether the link holds to its
rate. Where that is BBR, the default of some machines, a connection sends four packets at a time for 200 ms once in ten
seconds, to see how long an empty link takes: a step of training that this falls into takes a third longer. Here it is
Reno, which every kernel has and every namespace may choose. Losses alone hold it back, which a long queue prevents.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainplan.errors import RunError

MTU = 60_000  # of the relay: few large packets, since each costs it some microseconds
BURST = 128 * 1024  # bytes that the token bucket lets pass at once
WAITING = 64 * 2**20  # bytes that may wait for it: more than connections keep on their way, so that none are lost
CONTROL = "reno"  # TCP's congestion control
_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # of the namespace of whoever reads or writes it
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


@dataclass(frozen=True)
class Space:
    """A network namespace, and the one device in it that leads out."""

    name: str
    device: str
    address: str


@dataclass(frozen=True)
class SlowLink:
    """What lies between two namespaces."""

    rate: float  # bytes a second
    delay_s: float  # of every packet, one way
    spaces: tuple[Space, Space]

    @contextmanager
    def place(self, rank: int, world: int) -> Iterator[None]:
        """Processes that this thread starts meanwhile are in the namespace of a rank, and gloo uses its device."""
        space = self.spaces[rank * 2 // world]
        known = os.environ.get("GLOO_SOCKET_IFNAME")
        try:
            with _inside(space):
                os.environ["GLOO_SOCKET_IFNAME"] = space.device
                yield
        finally:
            if known is None:
                os.environ.pop("GLOO_SOCKET_IFNAME", None)
            else:
                os.environ["GLOO_SOCKET_IFNAME"] = known

    def bytes_sent(self, side: int) -> int:
        """Bytes that a side has sent, headers included, by the account of its device."""
        space = self.spaces[side]
        answer = _ip("-n", space.name, "-s", "-o", "link", "show", "dev", space.device)
        behind = answer.partition("TX:")[2]  # titles of columns, and then the numbers
        return int(next(word for word in behind.replace("\\", " ").split() if word.isdigit()))


@contextmanager
def slow_link(rate: float, delay_s: float = 0.0, control: str = CONTROL) -> Iterator[SlowLink]:
    """Two namespaces with a link of `rate` bytes a second and, if asked, a delay; gone afterwards. `control`: which
    congestion control connections have."""
    why = missing(delay_s)
    if why:
        raise RunError("a slow link between two network namespaces", why, "a container or machine where you are root")
    mark = f"{os.getpid()}-{next(_numbers)}"
    spaces = tuple(Space(f"trainplan-{mark}-{n}", "slow", f"10.77.0.{n + 1}") for n in range(2))
    with ExitStack() as stack:
        for space in spaces:
            _ip("netns", "add", space.name)
            stack.callback(_ip, "netns", "delete", space.name)
            _ip("-n", space.name, "link", "set", "lo", "up")
            _choose(space, control)
        if delay_s:
            stack.enter_context(_relay(spaces, rate, delay_s))
        else:
            _token_bucket(spaces, rate)
        yield SlowLink(rate, delay_s, (spaces[0], spaces[1]))


def missing(delay_s: float = 0.0) -> str:
    """Why there can be no slow link here; empty: there can.

    >>> isinstance(missing(), str)
    True
    """
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"there is no `{tool}` on this machine"
    if delay_s and not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun on this machine"
    try:
        _ip("netns", "add", name := f"trainplan-{os.getpid()}-try")
        _ip("netns", "delete", name)
    except RunError as error:
        return f"the kernel gives none: {error.why}"
    return ""


def _choose(space: Space, control: str) -> None:
    """Connections that are made in a namespace have this congestion control."""
    with _inside(space):
        try:
            _CONTROL.write_text(control)
        except OSError as error:  # it is not there, or not allowed outside of the first namespace
            allowed = " or ".join(_ALLOWED.read_text().split()) if _ALLOWED.exists() else CONTROL
            why = f"the kernel does not let a namespace have it: {error.strerror}"
            raise RunError(f"a slow link with congestion control {control!r}", why, allowed) from None


def _token_bucket(spaces: tuple[Space, ...], rate: float) -> None:
    first, second = spaces
    _ip(
        "link", "add", first.device, "netns", first.name, "type", "veth",
        "peer", "name", second.device, "netns", second.name,
    )  # fmt: skip
    for space in spaces:
        shape = ["rate", f"{round(rate * 8)}bit", "burst", str(BURST), "limit", str(WAITING)]
        _run("tc", "-n", space.name, "qdisc", "add", "dev", space.device, "root", "tbf", *shape)
        _up(space)


@contextmanager
def _relay(spaces: tuple[Space, ...], rate: float, delay_s: float) -> Iterator[None]:
    words = [f"{s.name}:{s.device}" for s in spaces] + [str(rate), str(delay_s)]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("relay.py")), *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            why = "the relay between them did not start"
            raise RunError("a slow link between two network namespaces", why, "one without a delay, which needs none")
        for space in spaces:
            _ip("-n", space.name, "link", "set", space.device, "mtu", str(MTU), "txqueuelen", "4000")
            _up(space)
        yield
    finally:
        process.kill()
        process.wait()


def _up(space: Space) -> None:
    _ip("-n", space.name, "address", "add", f"{space.address}/24", "dev", space.device)
    _ip("-n", space.name, "link", "set", space.device, "up")


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip() or f"it ended with code {done.returncode}"
        raise RunError(" ".join(words), why, "root, and a kernel that has network namespaces; or no slow link")
    return done.stdout


@contextmanager
def _inside(space: Space) -> Iterator[None]:
    """This thread, and what it starts, is in a namespace meanwhile."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(space.name)
        yield
    finally:
        _set_namespace(own)
        os.close(own)


def enter(name: str) -> None:
    """From now on this thread, and what it starts, is in that network namespace."""
    file = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        _set_namespace(file)
    finally:
        os.close(file)


def _set_namespace(file: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # Python has os.setns from 3.12 on
    if libc.setns(file, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "setns")
