"""The command ``python -m camshaft.checkpoint``, which lists, verifies, and merges checkpoints."""

import sys

from camshaft.handlers.checkpoint.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
