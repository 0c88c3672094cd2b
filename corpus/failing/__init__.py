"""Planted failures: one small file each."""
