"""Where ranks meet: a host and a port, behind which one of them keeps a store.

A port may be somebody else's. Whoever wants to listen there is told at once; but torch waits without end for an answer
from a program that takes its connection and is no store. So we look before we leap, and wait for so long only.
"""

from __future__ import annotations

import errno
import socket
import time
from contextlib import closing
from datetime import timedelta
from threading import Thread

import torch.distributed as dist

from trainplan.errors import InputError, RunError

DEFAULT_PORT = 29400  # torchrun's, for several nodes
PATIENCE = 15.0  # seconds for a store to answer whoever has reached it
_REACH = 3.0  # seconds to find out whether anybody listens


def parse(endpoint: str) -> tuple[str, int]:
    """Host and port.

    >>> parse("node-0:29500"), parse("node-0"), parse("[::1]:80")
    (('node-0', 29500), ('node-0', 29400), ('::1', 80))
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        why = "it is not a host and a port from 1 to 65535"
        raise InputError(f"--endpoint {endpoint}", why, f"--endpoint HOST:{DEFAULT_PORT}")
    return host, int(port)


def check(endpoint: str) -> None:
    """Refuse a place to meet that is not known, or where another program is."""
    host, port = parse(endpoint)
    try:
        addresses = [found[4] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        why = f"host {host!r} is not known ({error.strerror})"
        instead = f"--endpoint ADDRESS:{port}, with a name or number that every machine knows the first one by"
        raise RunError(f"meeting at {endpoint}", why, instead) from None
    try:
        socket.create_connection((host, port), timeout=_REACH).close()
    except OSError:  # nobody listens, as it should be before we do; unless somebody is about to
        if _is_here(str(addresses[0][0])) and not _can_listen(port):
            raise in_use(host, port) from None
        return
    store(host, port, 1, master=False, timeout=timedelta(seconds=PATIENCE))  # whose port is it? A store's, or we raise


def store(host: str, port: int, world: int, master: bool, timeout: timedelta) -> dist.TCPStore:
    """The store at that place: made there by the master, reached by the others."""
    found: list[dist.TCPStore | BaseException] = []

    def make() -> None:
        try:
            # Not waiting for the others here: that is what joining a group is for.
            made = dist.TCPStore(host, port, world, is_master=master, timeout=timeout, wait_for_workers=False)
            found.append(made)
        except BaseException as error:
            found.append(error)

    if not master:
        _reach(host, port, timeout)
    thread = Thread(target=make, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if not found:
        raise in_use(host, port)
    if isinstance(found[0], BaseException):
        if "EADDRINUSE" in str(found[0]):
            raise in_use(host, port) from None
        raise found[0]
    return found[0]


def in_use(host: str, port: int) -> RunError:
    """That a port is another program's, and one that is free here."""
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        other = free.getsockname()[1]
    why = f"port {port} of {host} is in use by another program"
    return RunError(f"meeting at {host}:{port}", why, f"another port, such as {other}")


def _reach(host: str, port: int, timeout: timedelta) -> None:
    """Wait until somebody listens there."""
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=_REACH).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                why = f"nobody has answered for {timeout.total_seconds():g} s ({error.strerror or error})"
                raise RunError(
                    f"meeting at {host}:{port}", why, "starting the rank or node that listens there"
                ) from None
        time.sleep(0.2)


def _is_here(address: str) -> bool:
    """Whether an address is one of this machine's."""
    with closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _can_listen(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a run before left behind is no hindrance
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
