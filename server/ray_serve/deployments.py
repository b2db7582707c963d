"""The deployments of `serve_app` as Ray Serve knows them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response

from ...engine.config import EngineConfig
from ..config import SEND_SECONDS, ServerConfig
from ..errors import HttpError
from ..guard import App, Receive, Scope, Send
from .ingress import Model, Part, ReplicaLost, make_ingress
from .model_deployments import ModelDeployment

_ROUTER = f"{__package__}.router.ContentRouter"


def replica_options(deployment: ModelDeployment, options: Mapping[str, Any], config: ServerConfig) -> dict[str, Any]:
    """Return the options of `serve.deployment` for a model. `options`: of LLM and of the server."""
    few, many = (deployment.replicas,) * 2 if isinstance(deployment.replicas, int) else deployment.replicas
    target = options.get("max_num_seqs", EngineConfig.max_num_seqs)  # as many as an engine computes at once
    router: Any = RequestRouterConfig  # of pydantic, which takes a text and declares a class
    scaling = {"min_replicas": few, "max_replicas": many, "initial_replicas": max(1, few), "target_ongoing_requests": target}
    return {
        **({"num_replicas": few} if few == many else {"autoscaling_config": scaling}),
        "ray_actor_options": {"num_cpus": deployment.num_cpus, "num_gpus": deployment.num_gpus},
        "request_router_config": router(request_router_class=_ROUTER),
        **ingress_options(config),
    }


def ingress_options(config: ServerConfig) -> dict[str, Any]:
    """Return the options of `serve.deployment` for the ingress."""
    return {
        "max_ongoing_requests": config.max_requests,
        "graceful_shutdown_timeout_s": config.drain_seconds + SEND_SECONDS,
    }


class IngressDeployment:
    """The deployment that Ray's proxy calls.

    Args:
        models: the names of each model with the handle of its deployment.
        config: options of the server.
    """

    def __init__(self, models: Sequence[tuple[Sequence[str], Any]], config: ServerConfig) -> None:
        by_name: dict[str, Model] = {}
        for names, handle in models:
            by_name |= dict.fromkeys(names, _sender(handle.options(stream=True)))
        application = serve.get_replica_context().app_name
        self._app = make_ingress(by_name, lambda: _is_ready(application), config)

    async def __call__(self, request: Request) -> Response:
        """Return a response that runs the application on the request."""
        return _AppResponse(self._app)


class _AppResponse(Response):
    """Response of an ASGI application, which reads the request itself."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = scope.get("root_path", "")
        if prefix and scope["path"].startswith(f"{prefix}/"):  # Ray's route_prefix
            raw_path = scope.get("raw_path", b"").removeprefix(prefix.encode())
            scope = {**scope, "path": scope["path"].removeprefix(prefix), "raw_path": raw_path, "root_path": ""}
        await self._app(scope, receive, send)


def _sender(handle: Any) -> Model:
    """Return a function that sends a request to a deployment."""

    async def respond(key: str | None, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[Part, None]:
        response, is_complete = handle.respond.remote(key, scope, body), False
        try:
            async for part in response:
                yield part
            is_complete = True
        except (RayActorError, DeploymentUnavailableError) as error:
            raise ReplicaLost(f"{type(error).__name__}: {error}") from None
        except BackPressureError:
            reason = "more requests wait for a replica than max_queued_requests allows; try again later"
            raise HttpError(503, reason, "overloaded") from None
        finally:
            if not is_complete:
                response.cancel()

    return respond


def _is_ready(application: str) -> bool:
    """Return whether all deployments of an application have their replicas."""
    status = serve.status().applications.get(application)
    return status is not None and status.status == "RUNNING"
