"""Triton kernels and their launchers, one file per op. Imported only if the dispatcher chooses "triton"."""
