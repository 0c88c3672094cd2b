"""What a guarded step costs as ranks are added, every rank with its own shard of parameters and gradients.

Weak scaling: each rank holds one million parameters in 108 tensors, as ZeRO shards them, so that a
rank's own work is the same whatever their number (the machine's memory is shared, and the bare step is not as
fast with more); what is added is the price of deciding together.
Collectives and their bytes are counted, not derived. No more ranks than cores: others would wait for one.
"""
