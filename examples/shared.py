"""Shared by the examples: the shipped model and media, a server, and error handling. Not an example itself."""

import argparse
import base64
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sensorium import SensoriumError

ASSETS = Path(__file__).resolve().parents[1] / "assets"


def run(main: Callable[[], list[str] | None]) -> None:
    """Run an example, and print each error as one line on stderr.

    `main` returns one line for each input that failed. These, a SensoriumError and an OSError exit with 2, like the `sensorium`
    command. An error of the packages openai and anthropic (from the server) or soundfile exits with 1. Other exceptions are
    raised.
    """
    code = 2
    try:
        failed = main() or []
    except (SensoriumError, OSError) as error:
        failed = [str(error)]
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in (
            "openai",
            "anthropic",
            "soundfile",
        ):  # by name: most examples import neither
            raise
        failed, code = [str(error)], 1
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    if failed:
        sys.exit(code)


def server_arguments(doc: str | None, model: str) -> argparse.ArgumentParser:
    """Return a parser with the options --model and --url. `model`: the shipped model that is the default."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", default=str(ASSETS / model))
    parser.add_argument("--url", help="URL of a running server, such as http://127.0.0.1:8000 (default: starts one)")
    return parser


@contextmanager
def serving(model: str, url: str | None = None, *options: str) -> Iterator[str]:
    """Yield `url`, or the URL of a new server for `model` with these options, which stops at the end of the block."""
    if url is not None:
        yield url
        return
    words = [sys.executable, "-m", "sensorium", "serve", model, "--port", "0", *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        try:
            last = "no server"
            for last in server.stderr:  # warnings, then "NAME is served on URL" or an error
                if " is served on " in last:
                    yield last.split()[-1]
                    return
            raise SensoriumError(last.strip().removeprefix("sensorium: error: "))
        finally:
            server.terminate()


def data_url(path: Path) -> str:
    """Return an image file as a URL that holds it."""
    return f"data:image/{path.suffix[1:]};base64,{base64.b64encode(path.read_bytes()).decode()}"
