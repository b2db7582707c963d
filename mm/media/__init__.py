"""Media loading and decoding: bytes to pixels, frames and samples."""
