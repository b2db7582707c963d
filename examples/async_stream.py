"""Ask several questions at once, printing each finished line: `python examples/async_stream.py [--model DIR]`."""

import argparse
import asyncio
import time
from pathlib import Path

from sensorium import AsyncLLM, SamplingParams, SensoriumError
from shared import ASSETS, run


async def ask(engine: AsyncLLM, name: str, image: Path) -> None:
    content = [{"type": "image", "image": image}, {"type": "text", "text": "Read the receipt."}]
    params = SamplingParams(temperature=0, max_tokens=48)
    line, start = "", time.perf_counter()
    first = True
    async for output in engine.generate([{"role": "user", "content": content}], params, request_id=name):
        if output.error:
            raise SensoriumError(f"{name}: {output.error}")
        if first:
            print(f"{name}: first token after {time.perf_counter() - start:.3f} s")
        first = False
        *whole, line = (line + output.outputs[0].text).split("\n")  # the text is the new part since the last output
        for complete in whole:
            print(f"{name}: {complete}")
    print(f"{name}: {line}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    args = parser.parse_args()

    async with AsyncLLM(args.model) as engine:
        images = sorted((ASSETS / "media").glob("receipt*.png"))
        await asyncio.gather(*(ask(engine, image.stem, image) for image in images))


if __name__ == "__main__":
    run(lambda: asyncio.run(main()))
