"""Commands: argument parsing and printing only."""
