"""What the guard adds to a step on one or more ranks, beside what is written by hand for the same purpose.

This measures strong scaling: one model of two million parameters in 50 tensors, whole on every rank (DDP) or
sharded over all of them (FSDP2). Ranks are processes on CPUs connected by gloo. With more ranks than cores,
they also wait for a core, so the rows for 4 and 8 ranks on a small machine say how often a step waits for the
other ranks, not what a network costs.
"""
