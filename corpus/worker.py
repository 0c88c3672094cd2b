"""A process that shows programs to a tool, so that one that hangs or crashes can be given up."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from corpus.task import Found, Task

__all__ = ["Worker", "load"]

_SPAWN = multiprocessing.get_context("spawn")


def load(spec: str) -> Callable[[Task], Found]:
    """The tool ``MODULE:FUNCTION``, or with the prefix ``command:`` a command line.

    Raises:
        ValueError: the text has neither form.
    """
    if spec.startswith("command:"):
        from corpus.tools.command import Command

        return Command(spec.removeprefix("command:"))
    module, colon, function = spec.partition(":")
    if not (module and colon and function):
        raise ValueError(f"tool: expected MODULE:FUNCTION, got {spec!r}")
    tool: Callable[[Task], Found] = getattr(importlib.import_module(module), function)
    return tool


def _serve(connection: Connection, spec: str, quiet: bool) -> None:
    """Answer with the tool's findings, or with the error that it raised, until the other end closes."""
    if hasattr(os, "setsid"):
        os.setsid()  # so that what the tool starts ends with this process
    if quiet:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        tool = load(spec)
    except BaseException as error:  # noqa: BLE001 - whatever importing a tool raises is reported
        connection.send({"fatal": _line(error)})
        return
    connection.send({})
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EOFError):
        os.chdir(folder)  # a program may write files
        while True:
            name = connection.recv()
            try:
                answer = asdict(tool(Task(name)))
            except BaseException as error:  # noqa: BLE001 - a tool that ends the process is a result too
                if not quiet:
                    traceback.print_exc()
                answer = {"error": _line(error)}
            connection.send(answer)


def _line(error: BaseException) -> str:
    """The type and the first line of the message, without folders of this machine."""
    first = (str(error).splitlines() or [""])[0]
    words = (Path(word).name if word.startswith("/") else word for word in first.split(" "))
    return f"{type(error).__name__}: {' '.join(words)}"[:200]


class Worker:
    """One process with one tool in it.

    Raises:
        RuntimeError: the tool cannot be loaded.
    """

    def __init__(self, spec: str, quiet: bool = True) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, spec, quiet), daemon=False)
        self._process.start()
        theirs.close()
        try:
            ready: dict[str, Any] = self._connection.recv()
        except EOFError:
            ready = {"fatal": "the process ended while it was imported"}
        if "fatal" in ready:
            self.close()
            raise RuntimeError(f"the tool {spec!r} cannot be loaded: {ready['fatal']}")

    def ask(self, name: str, timeout: float) -> dict[str, Any] | None:
        """The tool's answer, or ``error``; ``None`` after which the worker is used up: no answer in time, or
        the process ended."""
        try:
            self._connection.send(name)
            if self._connection.poll(timeout):
                answer: dict[str, Any] = self._connection.recv()
                return answer
        except (BrokenPipeError, ConnectionResetError, EOFError):
            pass
        return None

    @property
    def exit_code(self) -> int | None:
        """The exit status of a process that has ended."""
        self._process.join(timeout=1)
        return self._process.exitcode

    def close(self) -> None:
        """End the process and what it has started."""
        self._connection.close()
        pid = self._process.pid
        if hasattr(os, "killpg") and pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
