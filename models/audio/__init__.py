"""Sound encoders."""
