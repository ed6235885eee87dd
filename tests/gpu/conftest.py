"""Lets the tests here use the fake CuPy of `tests/device`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))
