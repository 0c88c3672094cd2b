"""Finding out what went wrong: replay, explain, audit, range report, and the watcher of scripts."""
