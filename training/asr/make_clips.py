"""Speak the clips in assets/speech with espeak-ng: `python -m training.asr.make_clips`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import soundfile

from .speech import RATE, Voice, speak

CLIPS = {
    "command.flac": ("Turn on the kitchen light.", Voice("en-us+m3", 150, 45)),
    "alarm.flac": ("Set an alarm for seven forty five in the morning.", Voice("en-gb-x-rp+f2", 160, 55)),
    "date.flac": ("Today is Monday the twenty third of November.", Voice("en+Annie", 165, 50)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("assets/speech"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, (text, voice) in CLIPS.items():
        soundfile.write(out / name, np.pad(0.8 * speak(text, voice), RATE // 4), RATE, subtype="PCM_16")
    answers = {name: text for name, (text, _) in CLIPS.items()}
    (out / "answers.json").write_text(json.dumps(answers, indent=2) + "\n")


if __name__ == "__main__":
    main()
