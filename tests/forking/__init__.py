"""Programs that tests start, forked from one process that has the frameworks imported.

A test that starts ``[sys.executable, "train.py"]`` waits mostly for ``import torch`` or ``import jax``.
With workers, ``sys.executable`` is a small client (``client.py``), also in the processes that it starts. It
sends its arguments, environment, folder and open files to a server (``server.py``), which forks; the fork
runs the program as ``python`` would, and what it imports for the first time is ready (``ready.py``).

Where a fork cannot stand for a new interpreter (options of Python, other settings of a framework in the
environment, another session of processes), or where there is no server, the client becomes the real Python.
Tests of what an import loads start ``FRESH`` themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["FRESH", "start", "stop", "use"]

# The interpreter itself, for tests that need one in which nothing has been imported.
FRESH = os.environ.setdefault("STABLENUM_TESTS_PYTHON", sys.executable)
_FOLDER = "STABLENUM_TESTS_FORKS"
_HERE = Path(__file__).parent


def start(*packages: str) -> subprocess.Popen[bytes] | None:
    """Start the server, and return its process, without waiting for its imports; None where there is none.

    Args:
        packages: those to have ready; all that the tests use if none is named.
    """
    if sys.platform != "linux" or _FOLDER in os.environ:
        return None
    folder = tempfile.mkdtemp(prefix="forks-")
    python = Path(folder, "python")
    python.write_text(f'#!/bin/sh\nexec "{FRESH}" -IS "{_HERE / "client.py"}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    os.environ[_FOLDER] = folder
    command = [FRESH, str(_HERE / "server.py"), folder, *packages]
    return subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": "0"}, stdin=subprocess.DEVNULL)


def use() -> None:
    """Let this process start its programs through the server, if there is one."""
    if _FOLDER in os.environ:
        sys.executable = str(Path(os.environ[_FOLDER], "python"))


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server, and remove its folder."""
    server.terminate()
    server.wait()
    shutil.rmtree(os.environ.pop(_FOLDER), ignore_errors=True)
