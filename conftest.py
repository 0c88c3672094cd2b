"""What the tests and the examples in the packages have in common."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from benchmarks.partners import torchvision_on_cpu

torchvision_on_cpu.allow()  # Lightning, fastai and transformers import it

# An integration cannot be imported without its partner.
INTEGRATIONS = {
    "stablenum_jax": ("flax", "orbax"),
    "stablenum_torch": ("accelerate", "fastai", "ignite", "lightning", "transformers"),
}
collect_ignore = [
    f"{package}/integrations/{name}.py"
    for package, names in INTEGRATIONS.items()
    for name in names
    if find_spec(name) is None
]


@pytest.fixture(autouse=True)
def _no_accelerate_state() -> Iterator[None]:
    """Accelerate allows one precision per process, which each Trainer sets; it is forgotten after a test."""
    yield
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
