"""Kinds of trouble, each with a real coordinator, real agents and real processes of jobs."""
