"""`sensorium.ray`: tasks on the rows of a Ray dataset, and a server on Ray Serve (`pip install "sensorium[ray]"`)."""

from __future__ import annotations

from ...pipelines.ray_data import map_batches
from .app import build_app, serve_app

__all__ = ["build_app", "map_batches", "serve_app"]
