"""Run a job again with its old output as a draft: same answers, fewer steps: `python examples/draft_text.py [--model DIR]`.

`llm.ocr` does the same with the text layer of PDF pages, without being asked.
"""

import argparse
from dataclasses import replace

from sensorium import LLM, SamplingParams
from shared import ASSETS, run

PROMPTS = ["one two three one two three", "The sky is blue, the sky is"]


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    args = parser.parse_args()

    llm = LLM(args.model, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    first = llm.generate(PROMPTS, params)
    drafts = [replace(params, draft_text=output.outputs[0].token_ids) for output in first]
    again = llm.generate(PROMPTS, drafts)
    errors = []
    for prompt, old, new in zip(PROMPTS, first, again, strict=True):
        accepted = sum(stats.num_accepted for stats in new.drafts)
        print(f"{prompt!r}: {len(new.outputs[0].token_ids)} tokens, {accepted} of them drafted")
        if new.outputs[0].token_ids != old.outputs[0].token_ids:
            errors.append(f"{prompt!r}: the answers differ")
    return errors


if __name__ == "__main__":
    run(main)
