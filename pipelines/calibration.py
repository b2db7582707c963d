"""Runs a model on calibration prompts, whose activations choose the scales of `quantize_checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..callers.errors import ConfigError
from ..engine.llm import LLM
from ..engine.sampling_params import SamplingParams

_TOKENS = 64  # of each sample that the model writes itself
_MAX_SAMPLES = 65536


def run_prompts(model: str, samples: int = 128, prompts: Sequence[Any] | None = None) -> None:
    """Load a model in this process and run prompts through it.

    Args:
        samples: how many prompts are used, 1 to 65536.
        prompts: as `LLM.generate` takes them, or lists of messages as `LLM.chat` takes them. None: the model writes them.

    Raises:
        ConfigError: `samples` is out of range, or there are no prompts.
        SensoriumError: as LLM, and a prompt that the model cannot take.
    """
    if not 1 <= samples <= _MAX_SAMPLES:
        raise ConfigError(f"<<param=>>{samples} must be from 1 to {_MAX_SAMPLES}", param="samples")
    if prompts is not None and not prompts:
        raise ConfigError("there are no calibration prompts; give at least one, or leave them out", param="prompts")
    with LLM(model, max_num_seqs=16, enable_prefix_caching=False) as llm:
        used: Sequence[Any] = _write_prompts(llm, samples) if prompts is None else prompts[:samples]
        first = SamplingParams(temperature=0.0, max_tokens=1)
        chats = [prompt for prompt in used if _is_chat(prompt)]
        others = [prompt for prompt in used if not _is_chat(prompt)]
        if chats:
            llm.chat(chats, first, use_tqdm=False, on_error="raise")
        if others:
            llm.generate(others, first, use_tqdm=False, on_error="raise")


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)


def _write_prompts(llm: LLM, count: int) -> list[str]:
    """Sample texts from the model, each after a single letter."""
    starts = [chr(ord("A") + i % 26) for i in range(count)]
    params = [SamplingParams(temperature=1.0, max_tokens=_TOKENS, seed=i) for i in range(count)]
    outputs = llm.generate(starts, params, use_tqdm=False, on_error="raise")
    return [start + output.outputs[0].text for start, output in zip(starts, outputs, strict=True)]
