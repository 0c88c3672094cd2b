"""Find out what went wrong: replay, audit, range report, and the watcher of scripts."""
