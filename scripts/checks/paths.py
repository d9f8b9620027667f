"""Paths in the repository."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "crates" / "testing" / "fixtures"
BUILT_IN = ROOT / "models" / "stories"
