"""timeslice: independent RL jobs take turns on the same accelerators."""
