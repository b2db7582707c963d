"""Commands: they parse arguments and print results."""
