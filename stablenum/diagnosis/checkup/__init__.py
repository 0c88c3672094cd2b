"""The checkup: what keeps a training from learning although every number is finite.

Adapters measure a sample of the steps; what is wrong is decided here, by rules over the whole course.
Where a comment gives no other reason, their bounds were chosen on the programs of ``corpus/silent`` that are
called tuned there.
"""
