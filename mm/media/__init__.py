"""Bytes to pixels, frames and samples: the one gate through which media comes in."""
