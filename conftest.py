"""What holds for all tests and for the examples in the packages."""

from importlib.util import find_spec

from benchmarks.partners import torchvision_on_cpu

torchvision_on_cpu.allow()  # Lightning, fastai and transformers import it
# An integration cannot be imported without its partner.
_WITH = {"stablenum_torch": ("accelerate", "fastai", "ignite", "lightning", "transformers")}
_WITH["stablenum_jax"] = ("flax", "orbax")
collect_ignore = [
    f"{ours}/integrations/{its}.py" for ours, all_ in _WITH.items() for its in all_ if not find_spec(its)
]
