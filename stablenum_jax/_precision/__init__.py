"""Number formats: policies, module by module, master weights, compensated sums and fp8."""
