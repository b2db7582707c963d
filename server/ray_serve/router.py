"""The request router of the models' deployments. Ray copies this file into the processes that route."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from .routing import preferred


class ContentRouter(RequestRouter):  # type: ignore[misc]
    """Sends requests with the same routing key, the first argument of their call, to the same replica. See `preferred`."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replicas in the order in which they are tried."""
        arguments = () if pending_request is None else pending_request.args
        key = arguments[0] if arguments and isinstance(arguments[0], str) else None
        replicas = {str(replica.replica_id): replica for replica in candidate_replicas}
        lengths = {name: self.replica_queue_len_cache.get(replica.replica_id) for name, replica in replicas.items()}
        order = preferred(key, {name: length or 0 for name, length in lengths.items()})
        return [[replicas[name]] for name in order]
