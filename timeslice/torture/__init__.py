"""Attacks a whole system with faults, writes down what happened, and judges it. See README.md."""
