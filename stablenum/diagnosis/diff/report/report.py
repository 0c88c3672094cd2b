"""The report of a comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from stablenum._support.files import write_text
from stablenum.diagnosis.diff.differences import Cause, Difference, Off, Row
from stablenum.diagnosis.diff.report.page import as_html
from stablenum.diagnosis.diff.report.rendering import as_rich, as_text
from stablenum.diagnosis.diff.report.repro import Repro, folder_of
from stablenum.diagnosis.edits.fix import Fix
from stablenum.diagnosis.report.html import framed
from stablenum.errors import either

__all__ = ["DiffReport"]

_WIDEST = 100  # columns: longer lines of text are hard to read


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """The result of comparing two programs.

    Experimental: the names of causes and the JSON may change in a minor version.

    Attributes:
        verdict: "the same in exact arithmetic", "the same but for constants in float32" or "different".
        differences: the places at which the programs part, each independent of those before it; one without a
            cause may follow from them.
        weights: parameter of the right program -> where it comes from. ``diff`` takes it as its ``weights``,
            also with some entries changed, but not the strings of a JSON report.
        carried_over: whether the right program was given these weights; otherwise both keep their own, and
            ``weights`` says between which parameters gradients and updates are compared.
        left_off: how far the left side is off its float64 twin, if the programs agree.
        right_off: the same for the right side.
        matched: how many of the values of each side the other side has too, and of how many.
        notes: what could not be compared.
        left_rows: the operations of the left side, as the page lists them.
        right_rows: those of the right side.
        stages: what a port has to pass, one after the other: "outputs" (with the losses of the first step),
            "gradients" and "training" (the updates, and all of later steps). Each "agrees", "differs" or is
            "not compared".
        fixes: changes of a side's source with which the programs agree, from ``stablenum diff --fix``.
    """

    verdict: str
    differences: tuple[Difference, ...] = ()
    weights: Mapping[str, str]
    carried_over: bool = True
    left_off: Off | None = None
    right_off: Off | None = None
    matched: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    notes: tuple[str, ...] = ()
    left_rows: tuple[Row, ...] = ()
    right_rows: tuple[Row, ...] = ()
    stages: Mapping[str, str] = field(default_factory=dict)
    fixes: tuple[Fix, ...] = ()
    _repro: Repro | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the programs compute the same, up to rounding."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference; None if there is none."""
        return self.differences[0] if self.differences else None

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of the first difference, the most likely first."""
        return self.first.causes if self.first is not None else ()

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        return as_rich(self, min(console.width, _WIDEST) if console.is_terminal else None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the single operations."""
        words = {name: str(said) for name, said in self.weights.items()}
        lean = replace(self, weights=words, left_rows=(), right_rows=(), _repro=None)
        hidden = ("left_rows", "right_rows", "_repro")
        return {k: v for k, v in {"ok": self.ok, **asdict(lean)}.items() if k not in hidden}

    def to_json(self) -> str:
        """Return the report as strict JSON."""
        return json.dumps(_plain(self.to_dict()), indent=2, allow_nan=False)

    def to_html(self) -> str:
        """Return one self-contained HTML page: no network, a light and a dark theme."""
        return as_html(self)

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks."""
        return framed(self.to_html())

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report in the format that the suffix names: ``.html``, ``.json`` or ``.txt``.

        Raises:
            ValueError: ``path`` has another suffix.
        """
        path = Path(path)
        forms = {".html": self.to_html, ".json": self.to_json, ".txt": self.__str__}
        form = forms.get(path.suffix.lower())
        if form is None:
            raise ValueError(
                f"path must end in {either(forms)}; got {str(path)!r}. The suffix selects the format."
            )
        write_text(path, form().rstrip("\n") + "\n")

    def write_repro(self, folder: str | PathLike[str]) -> None:
        """Write scripts that reproduce the first difference, and nothing else of the programs.

        ``left.py`` and ``right.py`` use their framework only. Each begins with values that both programs
        have, runs the operations up to the first value that differs, and prints it, all in float64;
        ``compare.py`` prints a few entries of both, how many differ, and how far they are apart.
        ``inputs.npz`` holds what they read, and as ``left`` and ``right`` what the comparison measured. A
        side that lacks the operation has no script. What cannot be written as code (a custom function, drawn
        random numbers) is read from ``inputs.npz``, and a comment says so; arrays beyond 32 MiB in total are
        left out, which the script says when it runs.

        Args:
            folder: is made if there is none; files of these names are replaced, others stay.

        Raises:
            TypeError: ``folder`` is no path.
            ValueError: the programs agree; there is a file of that name.
            OSError: the folder cannot be written to.

        Example:
            >>> import stablenum, stablenum_torch, torch
            >>> x = torch.linspace(-2, 2, 5, requires_grad=True)
            >>> sides = [stablenum_torch.program(f, x) for f in (torch.sin, torch.tanh)]
            >>> report = stablenum.diff(*sides)
            >>> from pathlib import Path
            >>> from tempfile import TemporaryDirectory
            >>> with TemporaryDirectory() as folder:
            ...     report.write_repro(folder)
            ...     sorted(path.name for path in Path(folder).iterdir())
            ['compare.py', 'inputs.npz', 'left.py', 'right.py']
        """
        path = folder_of(folder)
        if self._repro is None:
            raise ValueError(
                f"write_repro needs a difference to reproduce; this report says: {self.verdict}. "
                "Check report.ok first."
            )
        try:
            self._repro.write(path)
        except OSError as error:
            raise OSError(f"folder {str(path)!r} cannot be written to: {error}. Name another one.") from error


DiffReport.__module__ = "stablenum"  # pickles and messages name it as it is imported


def _plain(x: Any) -> Any:
    """Return values that strict JSON can hold."""
    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, tuple | list):
        return [_plain(v) for v in x]
    if isinstance(x, float) and x - x != 0:
        return str(x)
    return x
