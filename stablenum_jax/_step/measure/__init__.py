"""What is measured of gradients and weights: norms, exact sums, elements, units, and all of it over devices.

``norms`` has the norms of leaves, of any size, ``exactly`` sums that do not depend on the order, ``elements``
the largest and the tiny ones, ``units`` those of rows and columns. ``together`` and ``together_units`` have
what devices measure as one; ``over_axes`` and ``specs`` tell what each of them holds.
"""
