"""The training loops of all partners, by the names of the table. A loop's module is imported when it runs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.partners.outcome import Fault, Outcome

__all__ = ["PARTNERS", "RANK_FAULT", "Partner"]

RANK_FAULT = "nan_loss_on_one_rank"


@dataclass(frozen=True)
class Partner:
    """One row of the table.

    Attributes:
        module: the module below ``benchmarks.partners`` whose ``LOOPS`` has the loop.
        loop: its name there.
        packages: the distributions whose versions are stated.
        faults: the faults that the loop is run with.
    """

    module: str
    loop: str
    packages: tuple[str, ...]
    faults: tuple[str, ...] = tuple(Fault)

    def run(self, fault: str, *, guarded: bool) -> Outcome:
        """Train with a bad batch, and without it for reference.

        Raises:
            ValueError: the loop does not have this fault.
        """
        if fault not in self.faults:
            raise ValueError(f"fault must be one of {', '.join(self.faults)}; got {fault!r}.")
        loops = importlib.import_module(f"benchmarks.partners.{self.module}").LOOPS
        known = Fault(fault) if fault in tuple(Fault) else fault
        found: Outcome = loops[self.loop](known, guarded=guarded)
        return found


_WITHOUT_BATCH_NORM = tuple(fault for fault in Fault if fault is not Fault.NAN_IN_BATCHNORM)

PARTNERS = {
    "PyTorch, one process": Partner("torch_hf", "plain", ("torch",)),
    "PyTorch, DDP": Partner("torch_ranks", "ddp", ("torch",), (*Fault, RANK_FAULT)),
    "PyTorch, FSDP2": Partner("torch_ranks", "fsdp2", ("torch",), (*Fault, RANK_FAULT)),
    "Accelerate": Partner("torch_hf", "accelerate", ("accelerate",)),
    "Accelerate, two processes": Partner("torch_hf_ranks", "accelerate", ("accelerate",), (RANK_FAULT,)),
    "HF Trainer": Partner("torch_hf", "trainer", ("transformers", "accelerate")),
    "HF Trainer, two processes": Partner("torch_hf_ranks", "trainer", ("transformers",), (RANK_FAULT,)),
    "TRL SFTTrainer": Partner("torch_hf", "trl-sft", ("trl", "transformers"), _WITHOUT_BATCH_NORM),
    "sentence-transformers": Partner("torch_hf", "sentence-transformers", ("sentence-transformers",)),
    "Lightning, automatic": Partner("torch_trainers", "lightning", ("lightning",)),
    "Lightning, manual": Partner("torch_trainers", "lightning-manual", ("lightning",)),
    "ignite": Partner("torch_trainers", "ignite", ("pytorch-ignite",)),
    "fastai": Partner("torch_trainers", "fastai", ("fastai",)),
    "optax": Partner("jax_loops", "optax", ("optax", "jax")),
    "optax.MultiSteps": Partner("jax_loops", "optax.MultiSteps", ("optax",)),
    "optax.apply_if_finite": Partner("jax_loops", "optax.apply_if_finite", ("optax",)),
    "flax TrainState": Partner("jax_loops", "flax TrainState", ("flax",)),
    "flax DynamicScale": Partner("jax_loops", "flax DynamicScale", ("flax",)),
    "flax nnx.Optimizer": Partner("jax_loops", "flax nnx.Optimizer", ("flax",)),
    "equinox": Partner("jax_loops", "equinox", ("equinox",)),
    "jmp": Partner("jax_loops", "jmp", ("jmp",)),
    "Orbax": Partner("jax_loops", "Orbax", ("orbax-checkpoint",)),
    "Keras on JAX": Partner("jax_loops", "Keras on JAX", ("keras",)),
}
