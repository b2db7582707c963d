"""Triton kernels with their launchers, a file per op. Imported only where the dispatcher says "triton"."""
