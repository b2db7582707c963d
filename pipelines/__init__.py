"""Tasks built from requests: speech to text, reading images, embeddings and scores. The engine does not import this package."""
