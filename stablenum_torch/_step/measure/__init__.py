"""What is measured of gradients and weights: norms, exact sums, elements, units, and all of it over ranks.

``norms`` has the norms of tensors that float32 holds, ``wide`` those beyond it, ``exactly`` sums that do not
depend on the order, ``elements`` the largest and the tiny ones, ``units`` those of rows and columns, and
``together`` what ranks measure as one.
"""
