"""The torture run: what it does, and whether its checker catches what it should."""
