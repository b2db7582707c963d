"""The `sensorium` command: exit codes, one-line errors and help, without loading a model."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest
from sensorium.callers.errors import ConfigError
from sensorium.cli import main as cli
from sensorium.cli.common import option_help
from sensorium.cli.output import print_results
from sensorium.engine.config import EngineConfig
from sensorium.server.config import ServerConfig

TEXT_FILE = str(Path(__file__))


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Return the exit code and the one line on stderr."""
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert not out
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert err.startswith("sensorium: error: ")
    return code, err


@pytest.mark.parametrize("argv", [(), *((name,) for name in cli.COMMANDS)])
def test_help_has_an_example(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*argv, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("example: sensorium ")]
    if not argv:
        assert all(name in out for name in cli.COMMANDS)


def test_the_module_runs_as_a_script() -> None:
    run = subprocess.run([sys.executable, "-m", "sensorium.cli.main", "--version"], capture_output=True, text=True)
    assert run.returncode == 0
    assert run.stdout.startswith("sensorium ")


@pytest.mark.parametrize("imported", ["argparse", "torch"])  # before `main`, and by the command's module
@pytest.mark.parametrize(("received", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_modules_are_imported(imported: str, received: int, code: int, tmp_path: Path) -> None:
    (tmp_path / f"{imported}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    words = [sys.executable, "-m", "sensorium", "transcribe", "a.wav"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(tmp_path)}, **pipes) as run:
        assert run.stdout.readline() == "importing\n"
        run.send_signal(received)
        _, err = run.communicate()
    assert (run.returncode, err.strip()) == (code, "")


@pytest.mark.parametrize(
    ("command", "code"), [("list >&-", 0), ("ocr 'none*.png' 2>&-", 2), ("doctor --device cpu >/dev/full", 2)]
)
def test_streams_that_cannot_be_written(command: str, code: int, tmp_path: Path) -> None:
    shell = ["sh", "-c", f"'{sys.executable}' -m sensorium {command}"]
    run = subprocess.run(shell, capture_output=True, text=True, env={**os.environ, "HF_HOME": str(tmp_path)})
    assert run.returncode == code, run.stderr
    if "full" in command:
        assert run.stderr.startswith("sensorium: error: the disk is full: ")
        assert run.stderr.endswith("; free some space and run the command again\n")


def test_help_of_engine_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert "--max-num-seqs [VALUE] maximum number of sequences per step. --" in words  # text of LLM's option
    assert "--port VALUE TCP port; 0 lets the system choose one." in words  # text of the server's option
    assert "--tls-key VALUE files of the certificate chain and of its key, for HTTPS." in words
    assert "--enforce-eager" not in out  # vLLM's, without effect
    parser = cli.build_parser("serve")
    assert parser.parse_args(["serve", "m", "--enforce-eager"]).enforce_eager is True


def test_python_without_docstrings_parses_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -OO` drops them, and the help texts of options with them."""
    for options in (ServerConfig, EngineConfig):
        monkeypatch.setattr(options, "__doc__", None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", "--help"])
    assert stop.value.code == 0
    assert "--host VALUE" in capsys.readouterr().out


def test_every_option_has_a_help_text() -> None:
    for options in (EngineConfig, ServerConfig):
        names = {field.name for field in fields(options)}
        texts = option_help(options)
        assert names - {"model"} <= texts.keys() <= names
        assert all(len(text) > 10 for text in texts.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "nothing-here", "--port", "0"), "'nothing-here' is not a folder"),
        (("a", "--model", "b"), "both a and --model b name the model; give one of them"),
    ],
)
def test_serve_takes_the_model_as_a_flag(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = failure(capsys, "serve", *words)
    assert code == 2
    assert said in line


def test_aligner_without_times_of_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = failure(capsys, "transcribe", "a.flac", "--aligner", "ctc")
    assert code == 2
    assert "--aligner is for --word-timestamps and --speakers" in line


def test_names_of_files_are_printed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    args, fields = Namespace(json=False), {"error": None, "finish_reason": "stop"}
    assert print_results(args, ["a\nb.png", "ö.png"], [(0, "x"), (1, "y")], lambda text: (fields, text)) == 0
    assert capsys.readouterr().out == "a\\nb.png: x\nö.png: y\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import sensorium

    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"sensorium {sensorium.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "COMMAND"),
        (("reed",), "'reed'"),
        (("chta", "--model", "x", "q"), "; did you mean chat? See `sensorium --help`"),
        (("--hlep",), "--hlep; did you mean --help? See `sensorium --help`"),
        (("transcribe", "a.flac", "--format", "srtt"), "; did you mean srt? See `sensorium transcribe --help`"),
        (("doctor", "--colour"), "--colour; see `sensorium doctor --help`"),
        (("ocr", "a.png", "--jsn"), "--jsn; did you mean --json? See `sensorium ocr --help`"),
        (("chat", "--model", "x", ""), "the question is empty; give one, or leave it out for a conversation"),
        (("chat", "q"), "required: --model, a folder or a name on the Hub. example: sensorium chat --model Qwen/"),
        (("chat", "--model", "x", "--max-tokens", "many", "q"), "'many'"),
        (("chat", "--model", "x", "--max-tokens", "0", "q"), "--max-tokens: '0' is not an integer of 1 or above; see"),
        (("ocr", "a.png", "--max-tokens", "-3"), "--max-tokens: '-3' is not"),
        (("chat", "--model", "x", "--image", "", "q"), "--image: the path is empty"),
        (("ocr", ""), "FILE: the path is empty"),
        (("chat", "--model", "x", "--max-tokns", "5", "q"), "did you mean --max-tokens?"),
        (("chat", "--model", "x", "--max-new-tokens=5", "q"), "did you mean --max-tokens?"),
        (("ocr", "a.png", "--cache-dir", "x"), "--cache-dir x; set the environment variable HF_HUB_CACHE"),
        (("bench", "startup", "--model", "x", "--max-num-sequences", "5"), "did you mean --max-num-seqs?"),
        (("transcribe", "a.flac", "--task", "sing"), "'sing'"),
        (
            ("chat", "--model", "x", "--image", "a.png", "--draw", "none/a.png", "q"),
            "--draw: the folder of 'none/a.png' does not",
        ),
        (("bench", "serve", "--plot", "none/a.png"), "--plot: the folder of 'none/a.png' does not exist; create it, or give"),
        (("quantize", "a", "b", "--samples", "0"), "--samples: '0' is not"),
        (("serve", "m", "--media", "{bad"), "--media: '{bad' is not JSON (Expecting property name"),
        (
            ("chat", "--model", "x", "--quantization", "{'method': 'int4'}", "q"),
            "--quantization: \"{'method': 'int4'}\" is not",
        ),
    ],
)
def test_wrong_command_line(argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = failure(capsys, *argv)
    assert code == 2
    assert said in line
    assert "--help" in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("chat", "q", "--temperature", "-1"), "--temperature -1.0 must be"),
        (("chat", "q", "--image", "none.png"), "the file 'none.png' cannot be read (No such file or directory)"),
        (("chat", "q", "--chat-template", "none.jinja"), "--chat-template 'none.jinja' cannot be read"),
        (("ocr", TEXT_FILE, "--chat-template", "{% if"), "the chat template cannot be compiled"),
        (("ocr", "none.png", "neither.png"), "the file 'none.png' cannot be read"),
        (("transcribe", "none.flac"), "the file 'none.flac' cannot be read"),
        (("transcribe", TEXT_FILE, "--max-line-width", "9"), "--max-line-width is for --format srt"),
        (("transcribe", TEXT_FILE, "--max-line-count", "2", "--json"), "--max-line-count is for --format srt"),
        (("transcribe", TEXT_FILE, "--beam-size", "99"), "--beam-size 99 must be an integer from 1 to 32"),
        (("transcribe", TEXT_FILE, "--word-timestamps", "--aligner", "none"), "--aligner none is not a folder"),
        (("transcribe", "--live", "none.flac"), "the file 'none.flac' cannot be read"),
        (("transcribe", "--live", "--rate", "10"), "its sample rate is 10 Hz"),
        (("transcribe", "--live"), "pip install sounddevice"),
        (("serve", "--tls-cert", TEXT_FILE, "--tls-key", TEXT_FILE), "give a chain and its key in PEM"),
        (("serve", "--allowed-local-media-path", "none"), "--allowed-local-media-path 'none' is not a folder; create it"),
        (("serve", "--port", "0", "--chat-template", "none.jinja"), "--chat-template 'none.jinja' cannot be read"),
    ],
)
def test_what_needs_no_model_is_checked_before_one_is_loaded(
    argv: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("sensorium.engine.engine.load_core", load)
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    code, line = failure(capsys, *argv, "--model", str(Path(cli.__file__).parents[1] / "assets" / "tiny-vl"))
    assert said in line
    assert code == 2


def test_serve_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = failure(capsys, "serve")
    assert code == 2
    assert "there is no model to serve; give a folder or a name on the Hub, as in `sensorium serve MODEL`" in line


def test_serve_without_its_packages_names_the_extra() -> None:
    """A new process, because the packages are imported here already."""
    hidden = ("fastapi", "starlette", "uvicorn", "prometheus_client", "websockets")
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden}));"
    code += " from sensorium.cli.main import main; sys.exit(main(['serve', 'm']))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "pip install 'sensorium[serve]'" in run.stderr


@pytest.mark.parametrize("command", ["chat", "doctor"])
def test_missing_folder(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "nothing"
    words = ("hello",) if command == "chat" else ()
    code, line = failure(capsys, command, "--model", str(folder), *words)
    assert code == 2
    assert str(folder) in line


def test_unknown_architecture_suggests_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2_5_VLForSomething"]}))
    code, line = failure(capsys, "chat", "--model", str(tmp_path), "hello")
    assert code == 2
    assert "Qwen2_5_VLForConditionalGeneration" in line


def test_demo_without_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = failure(capsys, "demo", "--media", str(tmp_path))
    assert code == 2
    assert "answers.json" in line


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("two\nlines"), 2), (RuntimeError("two\nlines"), 1), (ValueError(), 1)]
)
def test_failures_of_a_command(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("sensorium.cli.doctor.run", fail)
    got, line = failure(capsys, "doctor")
    assert got == code
    assert ("two lines" in line) == bool(str(error))
    with pytest.raises(type(error)):
        cli.main(["doctor", "--debug"])
    with pytest.raises(type(error)):
        cli.main(["--debug", "doctor"])


def test_log_records_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Only --debug prints tracebacks."""

    def run(args: object) -> int:
        log = logging.getLogger("sensorium.engine.core")
        log.warning("beware")
        log.error("a step failed", exc_info=IndexError("gone"))
        return 0

    monkeypatch.setattr("sensorium.cli.doctor.run", run)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().err == "sensorium: beware\n"
    assert cli.main(["doctor", "--debug"]) == 0
    assert capsys.readouterr().err == "sensorium: beware\nsensorium: a step failed\nIndexError: gone\n"


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sensorium.cli.doctor.run", interrupt)
    assert cli.main(["doctor"]) == 130


def test_interrupt_that_an_import_swallows() -> None:
    program = """
import os, signal, sys
from sensorium.cli import doctor, main

def run(args):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        raise AttributeError("half imported")

doctor.run = run
sys.exit(main.main(["doctor"]))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 130


@pytest.mark.full
def test_closed_pipe_is_no_error() -> None:
    """The exit code is that of other tools that SIGPIPE ends, such as `cat`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sensorium", "doctor", "--device", "cpu"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_parsing_imports_neither_torch_nor_other_commands() -> None:
    code = (
        "import sys; from sensorium.cli.main import build_parser; build_parser('chat');"
        "print([m for m in ('torch', 'numpy', 'sensorium.cli.demo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "sensorium", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("sensorium: error: ")
