"""Reports name a cell of a notebook by its number, not by the temporary file as which IPython compiles it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stablenum.diagnosis import Place

ROOT = Path(__file__).parents[2]

# What a kernel does: cells with numbers, each a file of its own.
KERNEL = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell, store_history=True).raise_error()
"""


def output_of(*cells: str) -> str:
    """What the cells of a notebook print."""
    command = [sys.executable, "-c", KERNEL.format(cells=cells)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True).stdout


def test_a_place_in_a_cell_is_named_by_the_number_of_the_cell() -> None:
    printed = output_of(
        "from stablenum.diagnosis import Place",
        "import sys\nfile = sys._getframe().f_code.co_filename",
        "print(Place(file, 2), Place('train.py', 3))",
    )
    assert printed == "In[2]:2 train.py:3\n"


def test_an_old_ipython_that_cannot_name_cells_leaves_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=object()))  # IPython 7
    monkeypatch.setitem(sys.modules, "IPython", old)
    assert str(Place("train.py", 3)) == "train.py:3"


@pytest.mark.slow
def test_a_replay_and_a_comparison_name_cells() -> None:
    printed = output_of(
        "import stablenum, stablenum_torch, torch\nx = torch.zeros(3, requires_grad=True)",
        "def left(x):\n    return x.log().sum()",
        "def right(x):\n    return x.sinh().sum()",
        "print(stablenum_torch.replay(left, x))",
        "y = torch.ones(3, requires_grad=True)",
        "print(stablenum.diff(stablenum_torch.program(left, y), stablenum_torch.program(right, y)))",
    )
    assert "In[2]:2: log gives inf (forward)" in printed
    assert "\n  left   In[2]:2  " in printed
    assert "\n  right  In[3]:2  " in printed
