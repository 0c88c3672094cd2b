"""Number formats: policies for models and modules, master weights, compensated sums and fp8."""
