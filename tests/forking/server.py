"""Fork for each program that a client asks for: ``python server.py FOLDER [PACKAGE ...]``.

The server has one thread and no backend of a framework has been started, so that a fork is as good as new.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

# Each with those before it that it needs. What the commands run in a script's process is here too.
PACKAGES = {
    "numpy": (),
    "torch": ("numpy",),
    "torch._dynamo": ("torch",),  # which the first step of an optimizer imports
    "jax": ("numpy",),
    "optax": ("jax",),
    "typer": (),
    "rich.console": (),
    "stablenum": (),
    "stablenum.diagnosis.watch.session": ("stablenum",),
    "stablenum.commands.app": ("stablenum", "typer"),
    "stablenum.commands.explain.command": ("stablenum.commands.app",),
    "stablenum.commands.explain.checkup_command": ("stablenum.commands.explain.command",),
    "stablenum.commands.diff.command": ("stablenum.commands.app", "numpy"),
    "stablenum.commands.compare.command": ("stablenum.commands.app", "numpy"),
    "stablenum.commands.report.command": ("stablenum.commands.app",),
    "stablenum_torch": ("stablenum", "torch"),
    "stablenum_torch._diagnosis.watch": ("stablenum_torch", "stablenum.diagnosis.watch.session"),
    "stablenum_torch._diagnosis.checkup.watch": ("stablenum_torch._diagnosis.watch",),
    "stablenum_jax": ("stablenum", "optax"),
}
# What Python and the frameworks read from the environment when they start: with other values, a new
# interpreter is needed.
READ_AT_START = (
    "CUDA", "JAX_", "LANG", "LC_", "LD_", "MALLOC", "MKL_", "OMP_", "PYTHON", "PYTORCH", "TF_",
    "TORCH",
)  # fmt: skip
# What torch writes into the environment of a process while it runs, a worker's too.
WRITTEN_BY_TORCH = {"PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"}
HASH_SEED = os.environ["PYTHONHASHSEED"]  # of this process; programs that ask for no other one have it too
_OUT_OF_THE_WAY = 600  # numbers of files that no program has open


def serve(folder: str) -> dict[str, Any]:
    """Answer clients until this process ends; return only in a fork, with what it is asked to run."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(os.path.join(folder, "socket"))
    listening.listen(100)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    clients: dict[int, socket.socket] = {}  # by the process that runs for it
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    poll.register(woken, select.POLLIN)
    starter = os.getppid()
    while os.getppid() == starter:  # it may have been killed
        for number, _ in poll.poll(5_000):
            if number == woken:
                os.read(woken, 4096)
            elif number == listening.fileno():
                client, _ = listening.accept()
                request, files = _request(client)
                if request is None:
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    _become(request, files)
                    return request
                for file in files:
                    os.close(file)
                clients[pid] = client
                poll.register(client, select.POLLIN)
                with contextlib.suppress(OSError):  # it has been killed: the next event says so
                    client.sendall(b"pid%d" % pid)
            else:  # the client has been killed
                for pid, client in clients.items():
                    if client.fileno() == number:
                        os.kill(pid, signal.SIGKILL)
                        poll.unregister(client)
        _report_ended(clients, poll)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _report_ended(clients: dict[int, socket.socket], poll: select.poll) -> None:
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        client = clients.pop(pid)
        try:
            poll.unregister(client)
            client.sendall(status.to_bytes(4, "big"))
        except (KeyError, OSError):  # the client has been killed
            pass
        client.close()


def _request(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return what a client asks for and its open files; None if a fork does not do, or the client is gone."""
    client.settimeout(20)
    files: list[int] = []
    try:
        length = int.from_bytes(client.recv(8, socket.MSG_WAITALL), "big")
        request = ast.literal_eval(client.recv(length, socket.MSG_WAITALL).decode())
        while len(files) < len(request["files"]):
            _, received, _, _ = socket.recv_fds(client, 1, 100)
            if not received:
                raise EOFError
            files += received
    except (EOFError, OSError, SyntaxError, ValueError):  # it has been killed on the way
        request = None
    if request and request["session"] == os.getsid(0) and _settings(request["environment"]) == SETTINGS:
        return request, files
    for file in files:
        os.close(file)
    return None, []


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what has to be the same; where modules are found is settled in the fork."""
    others = WRITTEN_BY_TORCH | {"PYTHONPATH"}
    read = {k: v for k, v in environment.items() if k.startswith(READ_AT_START) and k not in others}
    return {"PYTHONHASHSEED": HASH_SEED} | read


def _paths(environment: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH, as they stand in ``sys.path``."""
    return [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Give this fork the files, the environment and the place of the client."""
    numbers = request["files"]
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for file in files]
    os.closerange(0, _OUT_OF_THE_WAY)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.closerange(_OUT_OF_THE_WAY, _OUT_OF_THE_WAY + 1000)  # those of the other clients
    os.setpgid(0, request["group"])
    os.umask(request["umask"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for name in request["ignored"]:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    before = _paths(os.environ)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[1:] = [*_paths(os.environ), *(entry for entry in sys.path[1:] if entry not in before)]
    sys.executable = os.path.join(os.environ["STABLENUM_TESTS_FORKS"], "python")
    importlib.invalidate_caches()
    if "COVERAGE_PROCESS_START" in os.environ:  # as the sitecustomize of a recording does
        importlib.import_module("coverage").process_startup()
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        setattr(sys, name, _stream(number, name, mode, request["arguments"]))
        setattr(sys, f"__{name}__", getattr(sys, name))


def _stream(number: int, name: str, mode: str, arguments: list[str]) -> io.TextIOWrapper | None:
    try:
        raw = io.FileIO(number, mode, closefd=False)
    except OSError:
        return None
    unbuffered = "-u" in arguments[: 1 + 2 * arguments.count("-W")]
    buffered = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    made = io.TextIOWrapper(
        buffered,
        encoding=sys.getdefaultencoding(),
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=number == 2 or unbuffered or raw.isatty(),
        write_through=unbuffered,
    )
    made.mode = mode
    raw.name = f"<{name}>"
    return made


def run(arguments: list[str]) -> None:
    """Run ``-c TEXT``, ``-m MODULE`` or a script, as ``python`` would."""
    main = ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *arguments]
    while arguments[0] in ("-u", "-W"):
        if arguments[0] == "-W":
            sys.warnoptions.append(arguments.pop(1))
            warnings._processoptions(sys.warnoptions[-1:])
        arguments = arguments[1:]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), vars(main))
    elif arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(arguments[1])
    else:
        sys.argv = arguments
        path = os.path.abspath(arguments[0])
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        vars(main).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        try:
            with open(path, "rb") as script:
                text = script.read()
        except OSError as error:
            sys.stderr.write(f"{sys.executable}: can't open file {path!r}: {error}\n")
            sys.exit(2)
        exec(compile(text, path, "exec", dont_inherit=True), vars(main))


def outcome(arguments: list[str]) -> int:
    """Return the exit code of a program, negative for a signal; what it raises is printed."""
    try:
        run(arguments)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - whatever a program raises, as Python itself does
        error.__traceback__ = _below(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> None:
    """End this process as Python does, but for the modules, which take long to take down one by one."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # none, or closed by the program
            pass
        except OSError:
            code = 120  # as Python ends whose output cannot be written
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _below(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return tb


SETTINGS = _settings(os.environ)  # before a framework changes them
READY = importlib.import_module("ready").Ready()
READY.load({name: PACKAGES[name] for name in sys.argv[2:]} or PACKAGES)
sys.meta_path.insert(0, READY)
gc.collect()
gc.freeze()
asked = serve(sys.argv[1])
end(outcome(asked["arguments"]))
