"""Helpers that the other parts use: whole files, checks of settings, pickles, warnings, public names."""
