"""Kernels, one file per op: the reference in torch beside the fast backends. Imports nothing else of sensorium."""
