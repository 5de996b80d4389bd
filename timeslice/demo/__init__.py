"""Two reinforcement-learning jobs that share two emulated devices by turns, and what that gained."""
