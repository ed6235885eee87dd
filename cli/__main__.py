"""`python -m ptxtrain.cli` is the `ptxtrain` command."""

from __future__ import annotations

import sys

from ptxtrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
