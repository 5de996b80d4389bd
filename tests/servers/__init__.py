"""Stand-ins for inference servers: the routes, state and faults of the real ones, with memory that is really freed."""
