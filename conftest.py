"""What the tests and the examples in the packages have in common."""

from importlib.util import find_spec

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
