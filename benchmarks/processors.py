"""Compare our processors with transformers' on one core, and two workers with one: `python -m benchmarks.processors --write`.

Every engine gets the same decoded images in its cheapest form (ours uint8 tensors with channels last, torchvision channels
first, Pillow its own images) and returns one merged batch. The engines take turns; the median of a case's rounds counts.
Equality is checked before timing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .throughput import machine, put

ROOT = Path(__file__).parents[1]
PHOTOS = {"1080p": (1920, 1080), "12 megapixels": (4000, 3000)}
FULL = 1 << 26  # pixels: no limit for these photos
DEFAULT = 1_003_520  # Qwen2-VL's defaults
Engines = dict[str, Callable[[], Any]]


def photo(width: int, height: int, seed: int) -> Any:
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (height // 20, width // 20, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def own(dtype: Any, max_pixels: int) -> Callable[[Sequence[Any]], Any]:
    from sensorium.mm.fields import merge
    from sensorium.mm.types import ImageItem
    from sensorium.models.families.qwen2_vl.processing import Qwen2VLProcessingInfo
    from sensorium.processors.files import ProcessorFiles

    info = Qwen2VLProcessingInfo(ProcessorFiles(), {"max_pixels": max_pixels})
    return lambda images: merge([info.process(ImageItem(pixels), dtype)[0] for pixels in images])


def pixels_of(image: Any) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.array(image))


def picture_engines(images: Sequence[Any], max_pixels: int) -> Engines:
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    size = {"shortest_edge": 56 * 56, "longest_edge": max_pixels}
    theirs = {"torchvision": Qwen2VLImageProcessor(size=size), "Pillow": Qwen2VLImageProcessorPil(size=size)}
    mine = {"bf16": own(torch.bfloat16, max_pixels), "f32": own(torch.float32, max_pixels)}
    last = [pixels_of(image) for image in images]
    forms = {"torchvision": [one.permute(2, 0, 1).contiguous() for one in last], "Pillow": list(images)}
    want = theirs["torchvision"](images=forms["torchvision"][:1], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(mine["f32"](last[:1])["pixel_values"], want, atol=1e-5, rtol=0)
    engines: Engines = {name: lambda run=run: run(last) for name, run in mine.items()}
    for name, run in theirs.items():
        engines[name] = lambda run=run, given=forms[name]: run(images=given, return_tensors="pt")
    return engines


def video_engines() -> Engines:
    import numpy as np
    import torch
    from sensorium.mm.types import FramePlan, VideoItem
    from sensorium.models.families.qwen2_vl.processing import Qwen2VLProcessingInfo
    from sensorium.processors.files import ProcessorFiles
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    frames = np.stack([np.asarray(photo(1280, 720, seed)) for seed in range(32)])
    bounds = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
    theirs = Qwen2VLVideoProcessor(size=bounds, cap_pixels_per_frame=False)
    info = Qwen2VLProcessingInfo(ProcessorFiles(), {"videos_kwargs": {"size": bounds}})
    plan = FramePlan(tuple(range(32)), tuple(i / 2 for i in range(32)), 32, 2.0)

    def mine(dtype: Any) -> Any:
        return info.process(VideoItem(torch.from_numpy(frames), plan), dtype)[0]["pixel_values_videos"].data

    def run() -> Any:
        return theirs(videos=[frames], return_tensors="pt", do_sample_frames=False)["pixel_values_videos"]

    torch.testing.assert_close(mine(torch.float32), run(), atol=1e-5, rtol=0)
    return {"bf16": lambda: mine(torch.bfloat16), "f32": lambda: mine(torch.float32), "torchvision": run}


def audio_engines(mels: int) -> Engines:
    import numpy as np
    import torch
    from sensorium.processors.mel import MelSpec, log_mel
    from transformers import WhisperFeatureExtractor

    samples = np.random.default_rng(0).standard_normal(480_000).astype(np.float32) * 0.1
    extractor, spec, given = WhisperFeatureExtractor(feature_size=mels), MelSpec(num_mel_bins=mels), torch.from_numpy(samples)

    def run() -> Any:
        return extractor(samples, sampling_rate=16000, return_tensors="pt")["input_features"]

    torch.testing.assert_close(log_mel(given, spec).T, run()[0], atol=1e-5, rtol=0)
    return {"f32": lambda: log_mel(given, spec), "transformers": run}


def race(engines: Engines, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each engine, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for run in engines.values():
        run()
    for _ in range(rounds):
        for name, run in engines.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1000)
    return {name: statistics.median(several) for name, several in times.items()}


def row(name: str, found: dict[str, float], wanted: str) -> str:
    """Format one row; ratios are relative to our bf16 (f32 for audio)."""
    mine = found.get("bf16", found["f32"])
    peers = [found.get(peer) for peer in ("torchvision", "Pillow", "transformers")]
    ratios = " | ".join("-" if peer is None else f"{peer:.1f} ({peer / mine:.1f}x)" for peer in peers)
    own_bf16 = f"{found['bf16']:.1f}" if "bf16" in found else "-"
    line = f"| {name} | {own_bf16} | {found['f32']:.1f} | {ratios} | {wanted} |"
    print(line, flush=True)
    return line


def scaling(rounds: int) -> str:
    """Return the ratio of images per second of two worker threads to one, best of the rounds."""
    import torch

    images, run = [pixels_of(photo(*PHOTOS["1080p"], seed)) for seed in range(24)], own(torch.bfloat16, DEFAULT)

    def work(share: Sequence[Any]) -> None:
        torch.set_num_threads(1)
        for image in share:
            run([image])

    def spent(workers: int) -> float:
        threads = [threading.Thread(target=work, args=(images[i::workers],)) for i in range(workers)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    times = [(spent(1), spent(2)) for _ in range(rounds)]
    one, two = (min(several) for several in zip(*times, strict=True))
    gain = one / two
    return f"Two workers on 24 photos of 1080p: {gain:.2f} times the throughput of one, efficiency {gain / 2:.2f} (target 0.8)."


def table(rounds: int) -> str:
    import torch

    torch.set_num_threads(1)
    lines = [
        machine().replace("2 threads", "1 thread"),
        "",
        "| milliseconds | bf16 | f32 | torchvision backend | Pillow backend | transformers | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, size in PHOTOS.items():
        for count in (1, 8):
            images = [photo(*size, seed) for seed in range(count)]
            wanted = "3.5x Pillow" + (", 3x torchvision" if count > 1 else "")
            found = race(picture_engines(images, DEFAULT), rounds)
            lines.append(row(f"{count} x {name}, default limits", found, wanted))
            found = race(picture_engines(images, FULL), max(3, rounds // 2) if count == 1 else 3)
            lines.append(row(f"{count} x {name}, full size", found, "1.5x the better"))
    lines.append(row("32 frames of 720p", race(video_engines(), rounds), "3x torchvision"))
    for mels in (80, 128):
        lines.append(row(f"30 s of audio, {mels} mels", race(audio_engines(mels), 3 * rounds), "2x"))
    return "\n".join([*lines, "", scaling(rounds)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from oracle import ensure_torchvision

    ensure_torchvision()
    found = table(args.rounds)
    print(found)
    if args.write:
        put("Processors against transformers', one core", found)


if __name__ == "__main__":
    main()
