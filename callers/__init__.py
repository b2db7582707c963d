"""Errors, copies of callers' arguments, other libraries' names for ours, and reprs of results; all folders use them."""
