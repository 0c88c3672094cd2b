"""What a guarded step costs as ranks are added, every rank with its own shard of parameters and gradients.

This measures weak scaling: each rank holds one million parameters in 108 tensors, sharded as in ZeRO, so that
a rank's own work does not depend on the number of ranks (the bare step still gets slower with more ranks,
because they share the machine's memory). What more ranks add is the cost of a joint decision. Collectives and
their bytes are counted, not derived. There are at most as many ranks as cores, because further ranks would
wait for a core.
"""
