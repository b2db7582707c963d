"""What is built from requests: speech written down, pictures read. The engine knows none of it."""
