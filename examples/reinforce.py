"""Teach a model by rewards, with evolution strategies: `python examples/reinforce.py [--model DIR] [--steps N]`.

Source: arXiv 1703.03864.
The reward of an answer is the share of its letters that are vowels. Only the weight of the last norm is trained. Each step asks
the engine with several weights around the current one, which `update_weights` puts in place.
"""

import argparse
from pathlib import Path

import torch
from safetensors import safe_open
from sensorium import LLM, SamplingParams
from shared import ASSETS, run

PROMPTS = ["one two three", "red green blue", "a dog and a cat", "the sky is"]
PAIRS, NOISE, RATE = 3, 0.1, 0.8


def read_weight(model: Path) -> tuple[str, torch.Tensor]:
    """Return the name and the values of the last norm's weight."""
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        names = [name for name in tensors.keys() if name.endswith("norm.weight") and "layers" not in name]  # noqa: SIM118
        name = next(name for name in names if "visual" not in name and "vision" not in name)
        return name, tensors.get_tensor(name).float()


def reward(llm: LLM) -> float:
    """Return the mean reward of the answers to all prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    texts = [answer.outputs[0].text for answer in llm.generate(PROMPTS, params, use_tqdm=False)]
    shares = [sum(letter in "aeiou" for letter in text) / max(1, sum(map(str.isalpha, text))) for text in texts]
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    llm = LLM(args.model, max_model_len=256, max_num_seqs=4, warm_up=False)
    name, weight = read_weight(Path(args.model))
    generator = torch.Generator().manual_seed(args.seed)
    print(f"step 0: reward {reward(llm):.3f}")
    for step in range(1, args.steps + 1):
        gradient = torch.zeros_like(weight)
        for _ in range(PAIRS):
            noise = torch.randn(weight.shape, generator=generator)
            rewards = []
            for sign in (1, -1):
                llm.update_weights([(name, weight + sign * NOISE * noise)])
                rewards.append(reward(llm))
            gradient += (rewards[0] - rewards[1]) * noise
        weight = weight + RATE * gradient / gradient.norm().clamp(min=1e-6) * NOISE * weight.numel() ** 0.5
        llm.update_weights([(name, weight)])
        print(f"step {step}: reward {reward(llm):.3f} with weights {llm.weights_version}")


if __name__ == "__main__":
    run(main)
