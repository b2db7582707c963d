"""Seeds of sequences and of their random numbers."""

from __future__ import annotations

_MASK64 = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """Return 64 well-spread bits for any integer: splitmix64's finaliser (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
