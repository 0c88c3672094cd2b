"""The report of a replay: its sections, rendered as text, HTML and for a terminal."""
