"""The inference engine: request handling, scheduler, KV and encoder caches, model runner, sampler and outputs."""
