"""The report of a replay, rendered as text, as HTML and for a terminal."""
