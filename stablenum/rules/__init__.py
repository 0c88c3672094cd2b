"""The rules of a guard: clipping, loss scales, spikes and escalation."""
