"""Number formats: precision policies, fp8 scaling, and 16-bit updates without rounding losses."""
