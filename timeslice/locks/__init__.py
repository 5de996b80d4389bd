"""The lock protocol: keys, Lua verbs, typed calls, flows without I/O, and their drivers. See README.md here."""
