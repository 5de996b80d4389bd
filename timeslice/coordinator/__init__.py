"""Drives swaps: owns served groups by lease, and takes each through plan, prepare, commit and promote."""
