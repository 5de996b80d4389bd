"""The Lua verbs, one a file, with shared pieces in ``include/``."""
