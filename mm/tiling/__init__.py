"""Tiling policies: from an image's size to the tiles that the encoder sees.

A policy's `plan(height, width)` is a pure function; `processors/images.py` applies the plan to pixels.
"""
