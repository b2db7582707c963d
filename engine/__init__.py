"""WHEN to compute WHAT in WHICH memory: requests, scheduler, caches, runner, sampler, outputs."""
