"""The backends by name. A framework is imported only when one of its backends is used."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass

from stablenum.commands.compare.backends.interface import Run, Setup
from stablenum.commands.compare.scenarios import Scenario, Stream

__all__ = ["BACKENDS", "REFERENCE", "Backend", "Run", "Setup", "find_backends", "versions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to run a training step.

    Args:
        name: the name on the command line, one word.
        about: how the step is run.
        framework: the framework. Backends of one framework share their plain runs.
        module: the module that has ``start(setup, mode)``; it is imported on first use.
        mode: the mode that is passed to ``start``.
        needs: the modules that must be installed.
        device: the device of PyTorch's tensors, as torch names it.
    """

    name: str
    about: str
    framework: str
    module: str
    mode: str
    needs: tuple[str, ...]
    device: str = "cpu"

    @property
    def missing(self) -> list[str]:
        """The modules of ``needs`` that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def why_not(self, scenario: Scenario, *, brief: bool = False) -> str | None:
        """Return why the backend does not run a scenario; None if it does.

        Args:
            scenario: the scenario.
            brief: whether to leave out a scenario if another one covers the same rules, see
                ``Stream.compiled_in``.
        """
        if self.framework == "torch" and isinstance(scenario, Stream) and not scenario.tensors:
            return "torch.optim rejects an empty parameter list"
        if brief and self.mode in _COMPILED and scenario.compiled_in is not None:
            return f"{scenario.compiled_in} compiles the same rules"
        return None

    def start(self, setup: Setup) -> Run:
        """Start a run."""
        placed = dataclasses.replace(setup, device=self.device)
        run: Run = importlib.import_module(self.module).start(placed, self.mode)
        return run


def _backend(name: str, framework: str, mode: str, about: str, *needs: str) -> Backend:
    module = f"stablenum.commands.compare.backends.{framework}_run"
    return Backend(name=name, about=about, framework=framework, module=module, mode=mode, needs=needs)


_COMPILED = ("compiled", "jit")  # the modes of backends that compile the whole step
_TORCH, _JAX = ("torch", "stablenum_torch"), ("jax", "optax", "stablenum_jax")
REFERENCE = "numpy"
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        _backend("numpy", "numpy", "eager", "stablenum.reference: the specification"),
        _backend(
            "torch",
            "torch",
            "fused",
            "stablenum_torch.wrap of fused optimizers (float16, bfloat16: foreach)",
            *_TORCH,
        ),
        _backend("torch-foreach", "torch", "foreach", "stablenum_torch.wrap of foreach optimizers", *_TORCH),
        _backend(
            "torch-compiled",
            "torch",
            "compiled",
            "torch.compile of opt.step (aot_eager)",
            *_TORCH,
        ),
        _backend("jax", "jax", "eager", "stablenum_jax.step, not jitted", *_JAX),
        _backend("jax-jit", "jax", "jit", "stablenum_jax.step under jax.jit", *_JAX),
    )
}


def find_backends(names: list[str] | None = None) -> tuple[list[Backend], dict[str, list[str]]]:
    """Return the backends to run, NumPy first, and what is missing for the others.

    Args:
        names: the requested backends; None or empty for all that are installed.

    Raises:
        ValueError: a name is unknown, or the libraries that the backend needs are not installed.
    """
    for name in names or ():
        if name not in BACKENDS:
            raise ValueError(f"unknown backend {name!r}; the known ones are {', '.join(BACKENDS)}.")
        if BACKENDS[name].missing:
            missing = BACKENDS[name].missing
            raise ValueError(
                f"backend {name!r} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
            )
    absent = {name: backend.missing for name, backend in BACKENDS.items() if backend.missing}
    chosen = [b for b in BACKENDS.values() if b.name not in absent and (not names or b.name in names)]
    if all(b.name != REFERENCE for b in chosen):
        chosen.insert(0, BACKENDS[REFERENCE])
    return chosen, absent


def versions() -> dict[str, str]:
    """Return the versions of Python and of every installed library that can affect a result."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in (
        "stablenum",
        "array-api-compat",
        "numpy",
        "ml-dtypes",
        "torch",
        "jax",
        "jaxlib",
        "optax",
        "scikit-learn",
        "matplotlib",
        "rich",
        "typer",
    ):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "stablenum" not in found:  # run from a source tree
        found["stablenum"] = importlib.import_module("stablenum").__version__
    return found
