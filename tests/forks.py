"""A Python that starts at once: each process is forked from one that has imported the big libraries already.

Importing torch, its exporter and numba takes seconds of every process, and tests start a hundred of them. `executable`
is a small program that takes the place of `sys.executable`: it hands its command line, environment, folder and standard
files to a server, and lives as long as the process that the server forks for it, passing signals on and ending as that
one ends. Processes which that one starts by its own `sys.executable` (torchrun, and the ranks) are made the same way.

Nothing of ours has been imported before the fork: every process imports trainplan as it would from a bare start. Tests
of how processes are started, killed and left behind, and of what is imported, use the real executable.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = (
    "torch.distributed.launcher.api", "torch.distributed.checkpoint", "torch.distributed.pipelining",
    "torch.nn.parallel", "torch.export._trace", "torch._dynamo", "torch._functorch.aot_autograd", "sympy.tensor.tensor",
    "numba", "numpy", "yaml", "psutil", "typer.testing", "rich.table", "rich.console", "rich.progress",
)  # fmt: skip
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def executable(folder: Path) -> Iterator[str]:
    """The path of a program that is used as `python [-u] -m MODULE …` or `python [-u] SCRIPT …`, while it is needed."""
    import subprocess
    import uuid

    if not sys.platform.startswith("linux"):  # processes are watched, and the socket named, as Linux does it
        yield sys.executable
        return
    program, address = folder / "python", f"\0trainplan-forks-{uuid.uuid4()}"
    program.write_text(
        f"#!{sys.executable} -IS\n"
        f"import sys\n\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom forks import ask\n\nask({address!r})\n"
    )
    program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, __file__, str(listener.fileno()), str(program)]
        server = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.PIPE, env=environment)
    try:
        yield str(program)
    finally:
        server.communicate()  # closes its standard input, at which it ends


# -- the small program -------------------------------------------------------------------------------------------------


def ask(address: str) -> None:
    """Have a process forked that does what this one was asked to do, and end as it ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        deaf = [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
        request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), deaf]).encode()
        socket.send_fds(server, [struct.pack("q", len(request))], [0, 1, 2])
        server.sendall(request)
        for number in set(PASSED_ON) - set(deaf):
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        answer = server.recv(4)
    code = struct.unpack("i", answer)[0] if answer else 1
    if code < 0:
        with contextlib.suppress(OSError):  # of signals that cannot be caught
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# -- the server --------------------------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> list[str]:
    """Fork a process for each request. Only these return, with the command line that is theirs."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:  # whoever started us has gone
            os._exit(0)
        connection, _ = listener.accept()
        minder = os.fork()
        if not minder:
            break
        connection.close()
    listener.close()
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    request = b""
    while len(request) < struct.unpack("q", head)[0]:
        request += connection.recv(1 << 20)
    worker = os.fork()
    if worker:
        for file in files:
            os.close(file)
        mind(connection, worker)
    connection.close()
    return become(files, *json.loads(request))


def mind(connection: socket.socket, worker: int) -> None:
    """Pass on to a process what its small program is sent, until one of the two has ended."""
    ended = os.pidfd_open(worker)
    while True:
        ready, _, _ = select.select([ended, connection], [], [])
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("i", code))
            os._exit(0)
        number = connection.recv(1)
        os.kill(worker, number[0] if number else signal.SIGKILL)
        if not number:
            os._exit(0)


def become(
    files: list[int], arguments: list[str], environment: dict[str, str], folder: str, deaf: list[int]
) -> list[str]:  # fmt: skip
    """Take on what a process has from the one that starts it, the signals that it passes over among it; the command
    line."""
    import random

    import numpy as np

    os.setsid()
    for number in PASSED_ON:  # the server may have been started in the background of a shell, where Ctrl-C is not heard
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in deaf else usual)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    np.random.seed()
    if "-u" in arguments[:1] or environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    arguments = arguments[1:] if arguments[0] == "-u" else arguments
    first = folder if arguments[0] == "-m" else str(Path(arguments[0]).resolve().parent)
    sys.path[:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return arguments


def main() -> None:
    number, program = sys.argv[1:]
    listener = socket.socket(fileno=int(number))
    for name in LIBRARIES:
        importlib.import_module(name)
    import numba
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    numba.njit(lambda: 0)()  # its first function makes the compiler ready
    # For an event that nobody listens to, torchrun looks up the module of every caller among all that are imported.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    gc.freeze()  # what the garbage collector does not visit stays shared
    arguments = serve(listener)
    sys.executable = program
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
