"""Changes of one expression in the user's source, to be tried in another run of the script."""

from stablenum.diagnosis.edits.edit import Edit

__all__ = ["Edit"]
