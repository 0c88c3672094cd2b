"""The rules that a guard follows: clipping, loss scales, spikes and escalation, one rule per file."""
