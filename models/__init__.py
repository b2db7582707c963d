"""WHAT a model computes: layers, decoder, towers and one short file per architecture."""
