"""Methods, parameters and outputs with vLLM's names do what they do there."""

from __future__ import annotations

import asyncio

import pytest
from sensorium import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from sensorium.mm.errors import InputError

GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def args(checkpoint):
    return EngineArgs(model=str(checkpoint), max_model_len=256, max_num_seqs=4, warm_up=False)


@pytest.fixture(scope="module")
def llm(args):
    return LLM.from_engine_args(args)


def test_later_changes_of_parameters_affect_later_requests(llm):
    params = SamplingParams(**GREEDY)
    handle = llm.request("import os", params)
    params.max_tokens = 2
    ((_, output),) = llm.serve([handle], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
    (output,) = llm.generate("import os", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    params.temperature = -1
    with pytest.raises(InputError, match="temperature"):
        llm.generate("import os", params, use_tqdm=False)


def test_allowed_tokens_and_no_text(llm):
    (output,) = llm.generate(
        "import os", SamplingParams(**GREEDY, allowed_token_ids=[40, 41], detokenize=False), use_tqdm=False
    )
    assert set(output.outputs[0].token_ids) <= {40, 41}
    assert output.outputs[0].text == ""


def test_kinds_of_outputs(args, llm):
    async def collect(engine, kind):
        params = SamplingParams(**GREEDY, output_kind=kind)
        return [output.outputs[0].text async for output in engine.generate("import os", params, "id")]

    async def run():
        engine = AsyncLLM(llm)
        kinds = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
        deltas, cumulative, final = [await collect(engine, kind) for kind in kinds]
        assert len(final) == 1
        assert cumulative[-1] == "".join(deltas) == final[0]
        other = AsyncLLM.from_engine_args(args)
        assert other.output_kind == "cumulative"
        assert (await collect(other, None))[-1] == final[0]
        other.close()

    asyncio.run(run())
