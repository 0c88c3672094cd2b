"""A program that is forked ends, prints and dies as one that a new interpreter runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forking
from tests.forking import FRESH

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only")


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """The client, with a server of its own that has NumPy ready."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STABLENUM_TESTS_FORKS", raising=False)
        server = forking.start("numpy")
        assert server is not None
        folder = Path(os.environ["STABLENUM_TESTS_FORKS"])
        patch.setenv("STABLENUM_TESTS_FORKS", str(folder))
        while not (folder / "socket").exists():
            assert server.poll() is None
            time.sleep(0.01)
        yield str(folder / "python")
        forking.stop(server)
        patch.setenv("STABLENUM_TESTS_FORKS", "")  # so that there is something to undo


def ran(python: str, *arguments: str, **options: object) -> tuple[int, str, str]:
    done = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=60, **options)
    return done.returncode, done.stdout, done.stderr


PROGRAMS = {
    "prints": "import sys; print('out'); print('err', file=sys.stderr)",
    "reads": "print(input())",
    "exits": "import sys; sys.exit(7)",
    "exits with a word": "import sys; sys.exit('bye')",
    "raises": "def f():\n    1 / 0\nf()",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "is interrupted": "raise KeyboardInterrupt",
    "runs functions at its end": "import atexit; atexit.register(print, 'end')",
    "waits for its threads": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"
    ),
    "has the environment": "import os; print(os.environ['A'], os.getcwd(), os.umask(0))",
    "has NumPy only when it imports it": (
        "import sys; print('numpy' in sys.modules); import numpy; print('numpy.linalg' in sys.modules)\n"
        "print(numpy.__spec__.name, numpy.__spec__.origin)"
    ),
    "has no annotations of the future": "class A:\n    x: int\nprint(A.__annotations__)",
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("how", ["a text", "a script", "a module"])
def test_a_fork_is_as_a_new_interpreter(python: str, name: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name], encoding="utf-8")
    arguments = {"a text": ["-c", PROGRAMS[name]], "a script": ["program.py"], "a module": ["-m", "program"]}
    options = {"cwd": tmp_path, "env": os.environ | {"A": name}, "input": "word"}
    given = ["-W", "ignore", "-u", *arguments[how], "more"]
    assert ran(python, *given, **options) == ran(FRESH, *given, **options)


def test_what_a_program_knows_of_itself_is_the_same(python: str, tmp_path: Path) -> None:
    text = (
        "import sys\nprint(sys.argv, sys.path[0], __file__, __name__, type(__loader__), __spec__)\n"
        "print(sys.warnoptions, sys.stdout.encoding, sys.stderr.errors, sys.stdin.mode, sys.stdout.name)"
    )
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    given = ["-W", "error", "script.py", "a", "-b"]
    assert ran(python, *given, cwd=tmp_path) == ran(FRESH, *given, cwd=tmp_path)


def test_a_program_is_forked_unless_a_fork_does_not_do(python: str) -> None:
    show = "import os; print(open(f'/proc/{os.getppid()}/cmdline').read().count('server.py'))"
    assert ran(python, "-c", show)[1] == "1\n"
    new = os.environ | {"PYTHONHASHSEED": "5"}
    assert ran(python, "-c", show, env=new)[1] == "0\n"
    assert ran(python, "-I", "-c", show)[1] == "0\n"
    assert ran(python, "-c", show, start_new_session=True)[1] == "0\n"
    none = os.environ | {"STABLENUM_TESTS_FORKS": ""}
    assert ran(python, "-c", show, env=none)[1] == "0\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGINT"])
def test_a_signal_ends_the_program_and_not_the_client_alone(python: str, name: str) -> None:
    number = getattr(signal, name)
    command = [python, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait() == -number
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the program outlives its client"
        time.sleep(0.01)
