"""Bodies of requests as pydantic models."""
