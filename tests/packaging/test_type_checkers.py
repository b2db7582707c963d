"""Type checkers and editors know the keywords of the public calls: pyright on scripts with right and with misspelled names."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from sensorium.engine import option_types as engine_options
from sensorium.engine.config import EngineConfig
from sensorium.engine.engine import OTHERS
from sensorium.engine.frontend import arguments
from sensorium.engine.llm import LLM
from sensorium.engine.vllm_args import NAMES
from sensorium.pipelines import option_types as task_options
from sensorium.pipelines.embed import EmbedOptions
from sensorium.pipelines.ocr import OcrOptions
from sensorium.pipelines.rank import ScoreOptions
from sensorium.pipelines.speak import speech_requests
from sensorium.pipelines.speak_text import SpeakTextOptions
from sensorium.pipelines.speech.options import FileOptions, LiveOptions

ROOT = Path(__file__).resolve().parents[2]

SCRIPTS = {
    "load": (
        'LLM("tiny-vl", dtype="float32", block_size=16, gpu_memory_utilization=0.5)',
        "block_size",
        "block_sise",
    ),
    "load_async": ('AsyncLLM("tiny-vl", max_waiting=8, seed=1, quantization="int8")', "max_waiting", "max_wating"),
    "engine_args": ('LLM.from_engine_args(EngineArgs("tiny-vl", kv_cache_dtype="int8"))', "kv_cache_dtype", "kv_cache_dtyp"),
    "generate": ('llm.generate("a", SamplingParams(temperature=0), use_tqdm=False, lora_request=None)', "use_tqdm", "use_tqm"),
    "chat": (
        'llm.chat([{"role": "user"}], mm_processor_kwargs={"fps": 2})',
        "mm_processor_kwargs",
        "mm_processor_kwarg",
    ),
    "stream": ('next(llm.stream("a", cache_salt="b"))', "cache_salt", "cache_sald"),
    "ocr": ('[page.text for page in llm.ocr("scan.pdf", question="Read.", max_tokens=8)]', "max_tokens", "max_token"),
    "embed": ('llm.embed(["a"], dimensions=8, pooling="mean")[0].vector', "dimensions", "dimension"),
    "transcribe": (
        'llm.transcribe("a.wav", timestamps="word", beam_size=5)[0].to_srt()',
        "beam_size",
        "beam_sise",
    ),
    "live": ("llm.live_audio(16000, pause=1.0, idle_timeout=None)", "pause", "pauze"),
}  # name -> an expression, one of its keywords, and how it is misspelled
UNPACKED = """from sensorium import LLM, AsyncLLM


def run(llm: LLM) -> None:
    segments, info = llm.transcribe("a.wav", timestamps=True)[0]
    print([segment.start + segment.words[0].end for segment in segments if segment.words], info.language, info.duration)


def opened() -> str:
    with LLM("tiny-vl") as llm:
        return llm.ocr("a.png")[0].text


async def opened_async() -> None:
    async with AsyncLLM("tiny-asr") as llm:
        print((await llm.transcribe("a.wav"))[0].text)
"""
HEAD = "from sensorium import LLM, AsyncLLM, EngineArgs, SamplingParams\n\n\ndef run(llm: LLM) -> object:\n    return "


def test_pyright_knows_the_keywords_of_every_call(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sensorium").symlink_to(ROOT)
    settings = {"extraPaths": ["own"], "include": ["*.py"], "typeCheckingMode": "standard", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    for name, (expression, keyword, misspelled) in SCRIPTS.items():
        assert f"{keyword}=" in expression
        (tmp_path / f"{name}.py").write_text(f"{HEAD}{expression}\n")
        changed = expression.replace(f"{keyword}=", f"{misspelled}=")
        (tmp_path / f"{name}_misspelled.py").write_text(f"{HEAD}{changed}\n")
    (tmp_path / "unpacked.py").write_text(UNPACKED)
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] >= 21
    wrong = dict[str, list[str]]()
    for entry in report["generalDiagnostics"]:
        if entry["severity"] == "error":
            wrong.setdefault(Path(entry["file"]).stem, []).append(entry["message"])
    assert set(wrong) == {f"{name}_misspelled" for name in SCRIPTS}, wrong
    for name, (_, _, misspelled) in SCRIPTS.items():
        assert any(misspelled in message for message in wrong[f"{name}_misspelled"])


def names_of(function: Any, *others: str) -> set[str]:
    """Return the parameters of a function without those named."""
    return set(inspect.signature(function).parameters) - {*others, "self"}


def test_the_types_name_every_option_of_the_engine() -> None:
    own = {option.name for option in fields(EngineConfig)}
    assert engine_options.VllmEngineArgs.__annotations__.keys() == NAMES - own
    assert names_of(LLM.__init__, "options") == {"model"}
    assert set(engine_options.LLMOptions.__annotations__) == (own | NAMES | {*OTHERS}) - {"model"}
    assert set(engine_options.ConfigOptions.__annotations__) == (own | NAMES) - {"model"}
    request = {*arguments.REQUEST_KEYS, *arguments._UNUSED}
    assert set(engine_options.RequestOptions.__annotations__) == request
    assert set(engine_options.ChatOptions.__annotations__) == {*request, *arguments._RENDERING, "adapter"}


def test_the_types_name_every_option_of_the_tasks() -> None:
    for keywords, options, positional in (
        (task_options.OcrKeywords, OcrOptions, ()),
        (task_options.EmbedKeywords, EmbedOptions, ()),
        (task_options.ScoreKeywords, ScoreOptions, ()),
        (task_options.TranscribeKeywords, FileOptions, ("language", "task")),
        (task_options.LiveKeywords, LiveOptions, ("rate",)),
    ):
        adapters = task_options.AdapterKeywords.__annotations__.keys()
        assert keywords.__annotations__.keys() - adapters == {option.name for option in fields(options)} - set(positional)
    speak = names_of(speech_requests, "engine", "messages", "sampling_params", "chat")
    chat = set(engine_options.ChatOptions.__annotations__)
    texts = {option.name for option in fields(SpeakTextOptions)}
    assert set(task_options.SpeakKeywords.__annotations__) == speak | chat | texts
