"""Endpoints: each function reads one request and returns its response."""
