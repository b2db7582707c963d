"""Prompts that are served in the order given, however slowly each of them is prepared. Tests only."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sensorium import LLM, SamplingParams


def generate_together(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> list[Any]:
    """As `llm.generate`; the engine's loop waits until as many are prepared as it prepares ahead, and takes them in order."""
    driver, gate = llm._driver, threading.Event()
    driver.send(lambda _: gate.wait(60))
    ready, until = min(len(prompts), 2 * llm.config.max_num_seqs), time.monotonic() + 60
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(llm.generate, prompts, params, use_tqdm=False, priority=list(range(len(prompts))))
        while driver._commands.qsize() < ready and time.monotonic() < until and not answers.done():
            time.sleep(0.01)
        gate.set()
        return answers.result()
