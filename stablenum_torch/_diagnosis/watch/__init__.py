"""Watch an unmodified PyTorch script: losses, gradients and parameters, around every optimizer step.

Only the commands ``stablenum explain`` and ``stablenum checkup`` use this.

- ``watcher`` looks at the steps and reports what is not finite; ``guarded_steps`` judges the steps that a
  guard skips, ``by_hand`` the gradients that no optimizer takes, and ``poisoned`` the running statistics.
- ``script_recorder`` records the steps that are replayed, and ``unseen`` looks without being noticed.
- ``optimizers`` and ``rates`` read an optimizer's step and settings; ``script_errors`` reads an exception.
"""

from __future__ import annotations

from stablenum_torch._diagnosis.watch.watcher import watch

__all__ = ["watch"]
