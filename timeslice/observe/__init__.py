"""Looks at a program that is not instrumented yet: when it uses the device, and where its holds would go."""
