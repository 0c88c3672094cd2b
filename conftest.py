"""What the tests and the examples in the packages have in common."""

from importlib.util import find_spec

from benchmarks.partners import torchvision_on_cpu

torchvision_on_cpu.allow()  # Lightning, fastai and transformers import it

# An integration cannot be imported without its partner.
collect_ignore = [
    f"stablenum_torch/integrations/{name}.py"
    for name in ("accelerate", "fastai", "ignite", "lightning", "transformers")
    if find_spec(name) is None
]
