"""The calls of trl's and verl's trainers, as their code makes them of vLLM, without the trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask
from lora import matrices, write
from parity import ROWS, LoadedModels
from safetensors.torch import load_file
from sensorium import LLM, LoRARequest, SamplingParams
from sensorium.callers.errors import InputError

pytestmark = pytest.mark.in_process
ROW = ROWS["qwen2_vl"]
ENGINE: dict[str, Any] = {
    "tensor_parallel_size": 1, "gpu_memory_utilization": 0.3, "max_num_seqs": 4, "max_model_len": 512,
    "distributed_executor_backend": "external_launcher", "seed": 0, "max_num_batched_tokens": 4096, "enable_sleep_mode": True,
    "model_impl": "auto", "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LoadedModels(tmp_path_factory.mktemp("base")).folder("qwen2_vl")


def test_calls_of_trl(base: Path) -> None:
    """A step wakes the weights, loads the policy's, wakes the cache, generates with log probabilities, and sleeps."""
    policy = {name: tensor for name, tensor in load_file(base / "model.safetensors").items() if "q_proj" in name}
    llm, texts = LLM(model=str(base), **ENGINE), list[Any]()
    params = SamplingParams(
        n=2,
        seed=0,
        repetition_penalty=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        max_tokens=6,
        logprobs=0,
        ignore_eos=True,
    )
    with llm:
        llm.sleep(level=2)
        for step in range(3):
            llm.wake_up(tags=["weights"])
            assert llm.collective_rpc("reload_weights") == [None]
            weights = [(name, tensor * (1 + (step > 0))) for name, tensor in policy.items()]
            assert llm.collective_rpc("load_weights", args=(weights,)) == [step + 1]
            llm.reset_prefix_cache()
            llm.wake_up(tags=["kv_cache"])
            prompts = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [9, 10]}]
            outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False)
            answers = [one for output in outputs for one in output.outputs]
            logprobs = [[next(iter(entry.values())).logprob for entry in one.logprobs] for one in answers]
            assert [len(one) for one in logprobs] == [6] * 4
            texts.append([list(one.token_ids) for one in answers])
            llm.sleep(level=2)
        assert texts[1] == texts[2] != texts[0]
        with pytest.raises(InputError) as caught:
            llm.collective_rpc("start_profile")
        assert (caught.value.info.code, caught.value.info.param) == ("unknown_name", "method")


def test_calls_of_verl(base: Path, tmp_path: Path) -> None:
    """The engine sleeps until the weights are there; prompts are token ids with media, and each has the same LoRARequest."""
    model, _ = ROW.load(base)
    folder = write(tmp_path / "adapter", str(base), matrices(model, r"language_model.*q_proj$"))
    question = ask(ROW, "i", 0).ours
    with pytest.warns(UserWarning, match="without effect"):
        llm = LLM(
            model=str(base), enable_lora=True, max_loras=1, max_lora_rank=8, load_format="auto", skip_tokenizer_init=False,
            disable_log_stats=True, enable_chunked_prefill=True, enable_prefix_caching=True, trust_remote_code=False, **ENGINE,
        )  # fmt: skip
    with llm:
        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        llm.update_weights(iter(load_file(base / "model.safetensors").items()))
        llm.wake_up(tags=["kv_cache"])
        prompts = [question, {"prompt_token_ids": [5, 6, 7, 8]}]
        request = LoRARequest(lora_name="123", lora_int_id=123, lora_path=str(folder))
        params = SamplingParams(n=1, logprobs=0, max_tokens=4, temperature=0.0, ignore_eos=True)
        adapted = llm.generate(prompts=prompts, sampling_params=params, lora_request=[request] * 2, use_tqdm=False)
        plain = llm.generate(prompts=prompts, sampling_params=params, lora_request=None, use_tqdm=False)
        assert [one.error for one in (*adapted, *plain)] == [None] * 4
        assert [len(one.outputs[0].token_ids) for one in adapted] == [4, 4]
        first = [torch.tensor([next(iter(entry.values())).logprob for entry in one.outputs[0].logprobs]) for one in adapted]
        assert all(one.isfinite().all() for one in first)
        assert {info.name for info in llm.list_adapters()} == {"123"}
