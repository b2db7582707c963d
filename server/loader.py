"""Loads the models of a server that has several."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..callers.errors import ConfigError, SensoriumError, short_repr
from ..engine.config import host_memory, make_config
from ..engine.engine import OTHERS
from ..engine.frontend.arguments import read_chat_template
from ..engine.setup.doctor import CheckedModel, check_model
from ..engine.setup.hub import find_model
from ..pipelines.llm import AsyncLLM
from .config import ServerConfig, with_defaults, with_lora
from .model_entries import PARSERS_OF_MODEL, ModelEntry
from .model_facts import ModelFacts, make_facts
from .model_pool import ModelPool
from .parsers.answer import answer_format
from .pooled_model import Limits, PooledModel, as_pooled
from .state import Server, Services
from .store import Store
from .tracing import loading_span


@dataclass
class EngineLoader:
    """`Loader` of the models in the configuration.

    Args:
        defaults: options of LLM for all models.
        provider: the TracerProvider, or None.
    """

    config: ServerConfig
    defaults: Mapping[str, Any]
    provider: Any = None
    services: Services = field(init=False, repr=False)

    def options(self, entry: ModelEntry) -> dict[str, Any]:
        """Return the options of LLM for a model."""
        options = {name: value for name, value in entry.options.items() if name not in PARSERS_OF_MODEL}
        return with_defaults(with_lora(options, entry.adapters), self.defaults)

    def model_config(self, entry: ModelEntry) -> ServerConfig:
        """Return the server's options with the names and parsers of a model."""
        parsers = {name: value for name, value in entry.options.items() if name in PARSERS_OF_MODEL}
        return replace(self.config, models=None, adapters={}, served_model_name=entry.names, **parsers)

    def load(self, name: str) -> Server:
        from prometheus_client import CollectorRegistry

        entry = next(candidate for candidate in self.config.models or () if candidate.names[0] == name)
        registry = CollectorRegistry()
        options = {"metrics": registry} | ({} if self.provider is None else {"tracing": self.provider})
        with loading_span(self.provider):
            llm = AsyncLLM(entry.path, self.config.max_requests, **(options | self.options(entry)))
        try:
            server = Server(llm, self.model_config(entry), name, registry, services=self.services)
            server.load_adapters(self.services.pool.find(name).adapters)  # with those that /v1/load_lora_adapter has added
            server.warn_about_reasoning()
            _ = server.facts  # computed here, because that takes a while
        except BaseException:
            llm.close()
            raise
        if self.config.exit_on_engine_death:
            llm.engine.loop.when_dead(lambda: self.services.on_engine_death())
        return server

    def close(self, model: Server) -> None:
        model.engine.close()
        gc.unfreeze()  # see freeze_loaded: else what is left of the model would never be collected

    def sleep(self, model: Server, level: int) -> None:
        model.engine.sleep(level)

    def wake_up(self, model: Server) -> None:
        model.engine.wake_up()

    def is_dead(self, model: Server) -> bool:
        return model.llm.errored


def make_services(
    config: ServerConfig, defaults: Mapping[str, Any], registry: Any = None, store: Store | None = None, provider: Any = None
) -> Services:
    """Plan the memory of the models in the configuration, and load those that are to be preloaded.

    Args:
        defaults: options of LLM for all models.
        registry: the CollectorRegistry of the metrics of HTTP requests.

    Raises:
        ConfigError: an option is wrong, or a model does not fit into `max_models_bytes`.
        CheckpointError, HubError: see `LLM`.
    """
    loader = EngineLoader(config, defaults, provider)
    entries = config.models or ()
    models = [_checked(loader, entry) for entry in entries]
    limit = config.max_models_bytes or _device_memory(loader, entries[0])
    for pooled in models:
        _check_room(short_repr(pooled.name), pooled.num_bytes, limit)
    first = [entry.names[0] for entry in entries if entry.preload]
    _check_room("all models with preload", sum(pooled.num_bytes for pooled in models if pooled.name in first), limit)
    limits = Limits(limit, config.model_idle_seconds, config.model_wait_seconds, config.model_queue)
    services = loader.services = Services(config, ModelPool(models, loader, limits), registry, store)
    try:
        services.pool.preload(first)
    except BaseException:
        for server in services.pool.loaded:
            server.engine.close()
        raise
    return services


def _checked(loader: EngineLoader, entry: ModelEntry) -> PooledModel[Server]:
    """Check the options of a model, and plan its memory, from the files beside the weights."""
    options = {name: value for name, value in loader.options(entry).items() if name not in OTHERS}
    try:
        server_config = loader.model_config(entry)
        checked = check_model(find_model(make_config(entry.path, options), weights=False))
        facts = _facts(checked, server_config, loader.options(entry).get("chat_template"))
    except SensoriumError as error:
        error.info = replace(error.info, text=f"the model {short_repr(entry.names[0])}: {error.info.text}")
        raise
    plan = checked.plan
    asleep_bytes = plan.processor_cache if plan.device == "cpu" else 0
    return PooledModel(entry.names, plan.total, asleep_bytes, facts, as_pooled(entry.adapters))


def _facts(checked: CheckedModel, config: ServerConfig, chat_template: str | None) -> ModelFacts:
    files = checked.files
    template = read_chat_template(chat_template) if chat_template else checked.template
    parsers = config.tool_call_parser, config.reasoning_parser
    answers = answer_format(template or "", checked.special_tokens, *parsers, files.architecture)
    return make_facts(checked.config, files, checked.core, checked.speech, template, answers)


def _device_memory(loader: EngineLoader, entry: ModelEntry) -> int:
    """Return the memory of the machine, or of the model's GPU."""
    device = make_config(entry.path, {"device": loader.options(entry).get("device", "auto")}).torch_device
    return host_memory() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[1])


def _check_room(what: str, size: int, limit: int) -> None:
    if size > limit:
        reason = f"{what} needs up to {size} bytes, as the memory plan says, and <<param>> is {limit}"
        how = "raise it, or lower kv_cache_memory_bytes, max_model_len or max_num_seqs of the model"
        raise ConfigError(f"{reason}; {how}", param="max_models_bytes", limit=limit, value=size)
