"""`serve_app`: an application of Ray Serve from models and options."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ...callers.errors import ConfigError, hint, short_repr
from ...engine.config import check_options
from ...engine.engine import OTHERS
from ..config import ServerConfig, split_options
from ..model_entries import PARSERS_OF_MODEL, ModelEntry
from .model_deployments import ModelDeployment, Replicas, count, read_models

if TYPE_CHECKING:
    from ray.serve import Application

_PROXY = "Ray's proxy listens; see serve.start(http_options=...)"
_SHARED = "requests of one client go to several replicas, which share no files"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("port", "uds", "metrics_port", "tls_cert", "tls_key", "max_connections", "header_seconds"), _PROXY),
    "root_path": "Ray has route_prefix for it; see serve.run",
    **dict.fromkeys(("data_dir", "batch_requests", "max_file_bytes", "max_files", "max_stored_bytes"), _SHARED),
    "admin_key": "a request reaches one replica only",
    **dict.fromkeys(("models", "served_model_name", "adapters"), "the argument <<models>> has names and adapters"),
    **dict.fromkeys(("max_models_bytes", "model_idle_seconds", "model_wait_seconds", "model_queue"), "a replica has one model"),
}
"""Options of the server that have no use here, and why."""
_OF_SERVER = frozenset(option.name for option in fields(ServerConfig))


def serve_app(
    models: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    *,
    replicas: Replicas = 1,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    engine_options: Mapping[str, Any] = {},
    server_options: Mapping[str, Any] = {},
    deployment_options: Mapping[str, Any] = {},
    ingress_replicas: int = 1,
) -> Application:
    """Return an application for `ray.serve.run`: the server's APIs, computed by replicas that Ray starts, scales and replaces.

    Each replica has an engine. Requests with the same media, or else with the same beginning of the text, go to the same
    replica, unless it has more requests than the others.

    Args:
        models: a model, as in `LLM`; or several, each an object with `path`, and optionally `name`, `options` (of LLM),
            `adapters` (folders by name), `replicas`, `num_cpus` and `num_gpus`. Every node needs their files.
        replicas: number of replicas, or the smallest and largest number, between which Ray scales by the requests in progress.
        num_cpus, num_gpus: what each replica needs.
        engine_options: of `LLM`, for all models.
        server_options: of `sensorium serve`, except those of listening, files, several models and administration.
        deployment_options: of `ray.serve.deployment`, for the models' deployments, such as `autoscaling_config`.
        ingress_replicas: number of processes that read requests and choose the replicas.

    Raises:
        ConfigError: Ray is not installed, or an option is wrong. Options are checked here, before Ray starts anything.
    """
    _check_packages()
    for name, reason in _REFUSED.items():
        if name in server_options:
            raise ConfigError(f"<<param=>>{short_repr(server_options[name])} has no use on Ray Serve: {reason}", param=name)
    deployments = read_models(models, replicas, num_cpus, num_gpus)
    _check_owner(engine_options, "engine_options")
    for index, deployment in enumerate(deployments):
        _check_owner(deployment.entry.options, f"models[{index}].options", PARSERS_OF_MODEL)
    options = [{**server_options, **engine_options, **_options(deployment.entry)} for deployment in deployments]
    configs = [_check_values(deployment.entry, own) for deployment, own in zip(deployments, options, strict=True)]
    return _bind(deployments, options, configs, deployment_options, count("ingress_replicas", ingress_replicas))


def _check_packages() -> None:
    """Raise ConfigError if Ray or the server's packages are missing."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("sensorium.ray needs Ray; run pip install 'sensorium[ray]'")
    try:
        from . import deployments  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the server needs more packages ({error}); pip install 'sensorium[ray,serve]'") from None


def _check_owner(options: Mapping[str, Any], where: str, allowed: Sequence[str] = ()) -> None:
    """Raise ConfigError for an option of the server among those of LLM. `where`: the argument that has them."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"<<param=>>{short_repr(options)} must be an object of options of LLM", param=where)
    for name in _OF_SERVER.difference(allowed).intersection(options):
        reason = _REFUSED.get(name, "give it in server_options")
        raise ConfigError(f"<<param=>>{short_repr(options[name])} in {where} is an option of the server: {reason}", param=name)


def _check_values(entry: ModelEntry, options: Mapping[str, Any]) -> ServerConfig:
    """Return the server's options of a model. Raise ConfigError for names and values that its replicas would refuse."""
    config, engine_options = split_options(options)
    check_options(entry.path, {name: value for name, value in engine_options.items() if name not in OTHERS})
    return config


def build_app(args: Mapping[str, Any]) -> Application:
    """Return `serve_app(**args)`: the builder for a config file of Ray Serve, which names it as
    `import_path: sensorium.server.ray_serve:build_app`. A list of two `replicas` is the smallest and largest number.

    Raises:
        ConfigError: see `serve_app`; and an unknown argument.
    """
    names = [*serve_app.__annotations__]
    for name in args:
        if name not in names:
            raise ConfigError(f"unknown argument {short_repr(name)}; {hint(name, names)}", param=name)
    if "models" not in args:
        raise ConfigError("<<param>> is missing; give a model, or a list of them", param="models")
    return serve_app(**args)


def _options(entry: ModelEntry) -> dict[str, Any]:
    """Return the options of one model: its own, and the server's for its names."""
    return {**entry.options, "served_model_name": [*entry.names], "adapters": {**entry.adapters}}


def _bind(
    deployments: Sequence[ModelDeployment],
    options: Sequence[Mapping[str, Any]],
    configs: Sequence[ServerConfig],
    deployment_options: Mapping[str, Any],
    ingress_replicas: int,
) -> Application:
    """Return the ingress, bound to the models' deployments."""
    from ray import serve

    from .deployments import IngressDeployment, ingress_options, replica_options
    from .replica import Replica

    deploy: Any = serve.deployment
    models = []
    for number, (deployment, own, config) in enumerate(zip(deployments, options, configs, strict=True)):
        arguments = {**replica_options(deployment, own, config), **deployment_options}
        name = deployment.entry.names[0] if len(deployments) == 1 else f"{number}-{deployment.entry.names[0]}"
        bound = deploy(Replica, name=name, **arguments).bind(deployment.entry.path, own)
        models.append(([*deployment.entry.names, *deployment.entry.adapters], bound))
    ingress = deploy(IngressDeployment, name="ingress", num_replicas=ingress_replicas, **ingress_options(configs[0]))
    application: Application = ingress.bind(models, configs[0])
    return application
