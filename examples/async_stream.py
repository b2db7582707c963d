"""Several questions at once, each answer as it comes: `python examples/async_stream.py [--model DIR]`."""

import argparse
import asyncio
from pathlib import Path

from sensorium import AsyncLLM, SamplingParams
from shared import ASSETS, run


async def ask(engine: AsyncLLM, name: str, image: Path) -> None:
    content = [{"type": "image", "image": image}, {"type": "text", "text": "Read the receipt."}]
    params = SamplingParams(temperature=0, max_tokens=48)
    async for output in engine.generate([{"role": "user", "content": content}], params, request_id=name):
        print(f"{name}: {output.error or output.outputs[0].text!r}")  # what is new since the last one
        if output.finished:
            print(f"{name}: first token after {sum(output.timings.values()) - output.timings['decode_steps']:.3f} s")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    args = parser.parse_args()

    async with AsyncLLM(args.model) as engine:
        images = sorted((ASSETS / "media").glob("receipt*.png"))
        await asyncio.gather(*(ask(engine, image.stem, image) for image in images))


if __name__ == "__main__":
    run(lambda: asyncio.run(main()))
