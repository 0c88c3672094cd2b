"""Inventories of other projects' pages, for intersphinx, with the names that these pages mention.

The projects publish whole inventories, but a build must not need the network.
"""

from __future__ import annotations

import zlib
from pathlib import Path

__all__ = ["PARTNERS", "mapping", "write_inventories"]

# By project: where its pages are, and by role and page the names; "{}" in a page is the name.
PARTNERS: dict[str, tuple[str, dict[tuple[str, str], str]]] = {
    "python": (
        "https://docs.python.org/3",
        {
            ("class", "library/stdtypes.html"): "str dict list tuple set bytes",
            ("class", "library/functions.html"): "bool int float object",
            ("class", "library/collections.abc.html"): (
                "collections.abc.Callable collections.abc.Iterable collections.abc.Iterator "
                "collections.abc.Mapping collections.abc.Sequence"
            ),
            ("class", "library/pathlib.html"): "pathlib.Path",
            ("exception", "library/exceptions.html"): (
                "Exception OSError RuntimeError SystemExit TypeError UserWarning ValueError"
            ),
        },
    ),
    "torch": (
        "https://docs.pytorch.org/docs/stable",
        {
            ("class", "optim.html"): "torch.optim.Optimizer",
            ("class", "tensors.html"): "torch.Tensor",
            ("class", "tensor_attributes.html"): "torch.dtype torch.device",
            ("class", "generated/{}.html"): "torch.nn.Module torch.optim.AdamW torch.Generator",
            ("function", "generated/{}.html"): "torch.nn.utils.clip_grad_norm_ torch.compile torch.save",
        },
    ),
    "jax": (
        "https://docs.jax.dev/en/latest",
        {
            ("class", "_autosummary/{}.html"): "jax.Array",
            ("function", "_autosummary/{}.html"): "jax.jit jax.grad jax.value_and_grad jax.lax.cond",
        },
    ),
    "optax": (
        "https://optax.readthedocs.io/en/latest",
        {
            ("class", "api/transformations.html"): (
                "optax.GradientTransformation optax.GradientTransformationExtraArgs"
            ),
            ("function", "api/transformations.html"): "optax.clip_by_global_norm",
            ("function", "api/optimizers.html"): "optax.adamw",
        },
    ),
    "numpy": (
        "https://numpy.org/doc/stable",
        {("class", "reference/generated/{}.html"): "numpy.ndarray"},
    ),
}
_FOLDER = Path("_build", "generated", "inventories")


def mapping() -> dict[str, tuple[str, str]]:
    """Return ``intersphinx_mapping``."""
    return {name: (url, str(_FOLDER / f"{name}.inv")) for name, (url, _) in PARTNERS.items()}


def write_inventories(docs: Path) -> None:
    """Write one inventory per project, in Sphinx's second format."""
    (docs / _FOLDER).mkdir(parents=True, exist_ok=True)
    for project, (_, pages) in PARTNERS.items():
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        lines = [
            f"{name} py:{role} 1 {page.format(name)}#{name} -\n"
            for (role, page), names in pages.items()
            for name in names.split()
        ]
        content = head.encode() + zlib.compress("".join(lines).encode())
        (docs / _FOLDER / f"{project}.inv").write_bytes(content)
