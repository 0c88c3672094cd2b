"""``python -m stablenum`` is the command ``stablenum``."""

from stablenum.cli import main

if __name__ == "__main__":
    main()
