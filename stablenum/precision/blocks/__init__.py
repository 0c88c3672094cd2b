"""Block formats: narrow numbers with one scale for each block (MXFP8, MXFP6, MXFP4, NVFP4, fp8 with 128)."""
