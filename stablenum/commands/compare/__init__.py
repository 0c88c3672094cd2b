"""The comparison: run the same unstable trainings on every backend, and check that the backends agree.

Scenarios are data (:mod:`stablenum.commands.compare.scenarios`); the built-in ones are in
:mod:`stablenum.commands.compare.builtin`. The command is ``stablenum compare``.
"""
