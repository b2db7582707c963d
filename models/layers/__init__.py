"""The building blocks models are written in."""
