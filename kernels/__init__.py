"""HOW it is computed fast: one file per op, reference and fast paths side by side. Imports nothing of ours."""
