"""Draft tokens with your own proposer, which knows former answers: `python examples/custom_proposer.py [--model DIR]`.

Whatever it proposes, answers are the same as without it.
"""

import argparse
from typing import ClassVar

from sensorium import LLM, SamplingParams
from shared import ASSETS, run

PROMPTS = ["one two three one two three", "The sky is blue, the sky is"]


class Phrases:
    """Proposes the rest of a phrase if the answer ends with its beginning."""

    name = "phrases"
    token_ids: ClassVar[list[list[int]]] = []  # of the phrases

    def __init__(self) -> None:
        self.matched = 0

    def propose(self, sequence, budget):
        answer = sequence.token_ids[sequence.turn_start :]
        for self.matched in range(min(8, len(answer)), 0, -1):
            for phrase in self.token_ids:
                if phrase[: self.matched] == answer[-self.matched :]:
                    return phrase[self.matched :]
        return ()


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    args = parser.parse_args()

    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with LLM(args.model, dtype="float32", speculative_config={"num_speculative_tokens": 0}) as llm:
        expected = llm.generate(PROMPTS, params)
    config = {"method": "custom_class", "model": Phrases}
    with LLM(args.model, dtype="float32", speculative_config=config) as llm:
        Phrases.token_ids = [list(output.outputs[0].token_ids[2:]) for output in expected]  # here, what was said before
        found = llm.generate(PROMPTS, params)
    errors = []
    for prompt, old, new in zip(PROMPTS, expected, found, strict=True):
        counts = [(one.proposer, one.num_drafted, one.num_accepted) for one in new.drafts]
        print(f"{prompt!r}: {len(new.outputs[0].token_ids)} tokens, drafts: {counts}")
        if new.outputs[0].token_ids != old.outputs[0].token_ids:
            errors.append(f"{prompt!r}: the answers differ")
    return errors


if __name__ == "__main__":
    run(main)
