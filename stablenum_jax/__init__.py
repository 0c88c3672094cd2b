"""stablenum for JAX: the guarded training step as an optax transformation.

tx = optax.chain(stablenum_jax.guard(clip=1.0, loss_scale="dynamic"), optax.adamw(1e-3))
opt_state = tx.init(params)

@jax.jit
def train_step(params, opt_state, batch):
    loss, grads = stablenum_jax.value_and_grad(loss_fn, opt_state)(params, batch)
    return stablenum_jax.step(tx, params, opt_state, grads, value=loss)
"""

from typing import TYPE_CHECKING

try:
    import jax  # noqa: F401  whether it is there
    import optax  # noqa: F401  whether it is there
except ModuleNotFoundError as error:
    if error.name not in ("jax", "optax"):
        raise  # they are there, and lack something themselves
    raise ModuleNotFoundError("stablenum_jax needs JAX: pip install jax optax", name=error.name) from error

from stablenum import __version__ as __version__
from stablenum._support.public_names import imported_later, present
from stablenum_jax import losses, numerics, policy
from stablenum_jax import typing as typing
from stablenum_jax._precision.compensated import kahan, master_weights, stochastic_rounding
from stablenum_jax._precision.fp8 import fp8_dot, init_fp8
from stablenum_jax._precision.model import precision
from stablenum_jax._precision.value_and_grad import value_and_grad
from stablenum_jax._step.readout import (
    clear_halt,
    guard_state_dict,
    history,
    load_guard_state_dict,
    metrics,
    scalars,
    unless_skipped,
)
from stablenum_jax._step.replicas import check_replicas
from stablenum_jax._step.run_log import RunLog
from stablenum_jax._step.scaled_loss import scale_loss
from stablenum_jax._step.training import step
from stablenum_jax._step.transform import chain, guard
from stablenum_jax._step.warnings import GuardPlacementWarning, NotATrueSkipWarning
from stablenum_jax._trees.state import guard_state, loss_scale

if TYPE_CHECKING:
    from stablenum_jax._diagnosis.audit import audit, repair
    from stablenum_jax._diagnosis.checkup.few_steps import checkup
    from stablenum_jax._diagnosis.diff.program import program
    from stablenum_jax._diagnosis.ranges import range_report
    from stablenum_jax._diagnosis.replay import replay
    from stablenum_jax._precision.blocks import dequantize, quantize
    from stablenum_jax._recovery.checkpoints import Checkpoints
    from stablenum_jax._recovery.eased import eased
    from stablenum_jax._recovery.recovery import Recovery

__all__ = [
    "Checkpoints",
    "GuardPlacementWarning",
    "NotATrueSkipWarning",
    "Recovery",
    "RunLog",
    "audit",
    "chain",
    "check_replicas",
    "checkup",
    "clear_halt",
    "dequantize",
    "eased",
    "fp8_dot",
    "guard",
    "guard_state",
    "guard_state_dict",
    "history",
    "init_fp8",
    "kahan",
    "load_guard_state_dict",
    "loss_scale",
    "losses",
    "master_weights",
    "metrics",
    "numerics",
    "policy",
    "precision",
    "program",
    "quantize",
    "range_report",
    "repair",
    "replay",
    "scalars",
    "scale_loss",
    "step",
    "stochastic_rounding",
    "unless_skipped",
    "value_and_grad",
]

__dir__ = present(globals())
if not TYPE_CHECKING:
    __getattr__ = imported_later(
        globals(),
        {
            "Checkpoints": "stablenum_jax._recovery.checkpoints",
            "Recovery": "stablenum_jax._recovery.recovery",
            "audit": "stablenum_jax._diagnosis.audit",
            "checkup": "stablenum_jax._diagnosis.checkup.few_steps",
            "dequantize": "stablenum_jax._precision.blocks",
            "eased": "stablenum_jax._recovery.eased",
            "program": "stablenum_jax._diagnosis.diff.program",
            "quantize": "stablenum_jax._precision.blocks",
            "range_report": "stablenum_jax._diagnosis.ranges",
            "repair": "stablenum_jax._diagnosis.audit",
            "replay": "stablenum_jax._diagnosis.replay",
        },
    )
