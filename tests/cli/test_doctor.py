"""`sensorium doctor`: sections, versions, and the report on a checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from sensorium import LLM
from sensorium.callers.errors import BusyError, CheckpointError
from sensorium.cli import decoding, doctor
from sensorium.cli.main import main
from sensorium.engine.config import EngineConfig
from sensorium.engine.setup.doctor import installation_problems
from sensorium.kernels import installation, native
from sensorium.mm.media import gate
from sensorium.processors.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def _decodes_nothing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare tests of other parts of the report the codec workers, which take seconds to start."""
    if request.function not in (test_report, test_a_codec_that_fails_is_a_problem):
        monkeypatch.setattr(doctor, "decoding_problems", list)


def sections(text: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            current = found.setdefault(line.rstrip(":"), {})
            continue
        name, _, value = line.strip().partition("  ")
        current[name] = value.strip()
    return found


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    found = sections(capsys.readouterr().out)
    assert found["packages"]["torch"] == torch.__version__
    assert found["device"]["device"] == "cpu"
    assert "cpu features" in found["device"]
    assert found["device"]["C++ kernels"] == native.instructions()
    for dtype in ("float32", "bfloat16", "float16"):
        assert {"attention", "linear", "rms_norm"} <= found[f"kernels, {dtype}"].keys()


@pytest.mark.full
@pytest.mark.skipif(native.products() is None, reason="needs the C++ products")
def test_measured_rates_are_shown_and_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "measured rates" not in sections(capsys.readouterr().out), "SENSORIUM_CPU names the instruction set in tests"
    code = "import sys; from sensorium.cli.main import main; sys.exit(main(['doctor', '--device', 'cpu']))"
    env = {**os.environ, "SENSORIUM_CPU": "linear_int8=torch", "XDG_CACHE_HOME": str(tmp_path)}
    printed = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    shown = [sections(text)["measured rates"] for text in printed]
    assert shown[0] == shown[1], "a second start reads what the first has kept"
    assert shown[0]["linear_int8"] == "torch (set by SENSORIUM_CPU)"
    assert re.fullmatch(r"\w+ \(\w+ \d+/\d+/\d+,.* GFLOP/s with 16/1/96 rows\)", shown[0]["linear_bfloat16"])
    assert shown[0]["rows, int4"].endswith("times the cost of one, for 1, 2, 4, 8, 16 rows")
    assert Path(shown[0]["kept in"]).is_file()


def test_every_extra_is_reported() -> None:
    """An extra that a user installs for a feature has at least one of its packages in the report."""
    listed = {how.split("[")[1].split("]")[0] for how in doctor.OPTIONAL.values()}
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert listed == project["optional-dependencies"].keys() - {"docs", "clients"}


def test_checkpoint(checkpoint: Path, checkpoint2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, family in ((checkpoint, "Qwen2_5_VL"), (checkpoint2, "Qwen2VL")):
        assert main(["doctor", "--model", str(folder), "--option", "dtype=bfloat16"]) == 0
        found = sections(capsys.readouterr().out)["checkpoint"]
        assert found["dtype"] == "bfloat16"
        assert found["architecture"] == f"{family}ForConditionalGeneration"
        assert found["takes"].split(", ") == ["text", "image", "video"]


def test_problems_are_printed_first(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(checkpoint), "--device", "cpu", "--option", "dtype=float32"]) == 0
    assert capsys.readouterr().out.startswith("problems:\n  none\npython:\n")
    folder = shutil.copytree(checkpoint, tmp_path / "half")
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(["doctor", "--model", str(folder), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("problems:\n  chat template  ")
    assert {"chat template"} == sections(out)["problems"].keys()
    (folder / "tokenizer.json").unlink()
    assert main(["doctor", "--model", str(folder), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("sensorium: error: ")
    assert "device" in sections(out)  # the facts are still printed


def test_tokenizer_files_that_llm_loads(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    source = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    assert main(["doctor", "--model", str(folder), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, tekken\.json, tokenizer\.model") as caught:
        LLM(folder)
    assert str(caught.value) in said
    (folder / "vocab.json").write_text(json.dumps(source["model"]["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in source["model"]["merges"]))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    added = {token["id"]: {key: value for key, value in token.items() if key != "id"} for token in source["added_tokens"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": added}))
    assert main(["doctor", "--model", str(folder), "--device", "cpu"]) == 0
    assert sections(capsys.readouterr().out)["checkpoint"]["tokenizer"] == "vocab.json and merges.txt"
    with LLM(folder, device="cpu", max_model_len=64) as llm:
        assert llm.get_tokenizer().encode("<|im_start|>user") == Tokenizer(checkpoint).encode("<|im_start|>user")


def test_memory_of_a_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for longest, mib in ((512, "24.0"), (1024, "48.0")):
        options = ["--option", f"max-model-len={longest}", "--option", "dtype=float32"]
        assert main(["doctor", "--model", str(checkpoint), "--device", "cpu", *options]) == 0
        shown = sections(capsys.readouterr().out)
        found = shown["memory"]
        assert shown["checkpoint"]["dtype"] == "float32"
        assert {"weights", "encoder cache", "activations", "total", "largest image", "largest video"} <= found.keys()
        assert found["key/value cache"] == f"{mib} MiB"
        assert found["media codecs"].endswith("not in the total; lower media_workers or media's max_bytes and max_video_bytes")
    assert main(["doctor", "--model", str(checkpoint), "--option", "max_model_length=5"]) == 2
    assert "max_model_len" in capsys.readouterr().err
    assert main(["doctor", "--model", str(checkpoint), "--option", "max_model_len"]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err
    assert main(["doctor", "--option", "max_model_len=5"]) == 2
    assert "give --model as well" in capsys.readouterr().err


def test_a_plan_over_the_machines_memory_is_a_problem(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sensorium.engine.setup import doctor as reports

    assert reports.host_memory() > 1 << 28
    monkeypatch.setattr(reports, "host_memory", lambda: 1 << 20)
    assert main(["doctor", "--model", str(checkpoint), "--device", "cpu", "--option", "max_model_len=512"]) == 0
    said = sections(capsys.readouterr().out)["problems"]["memory"]
    assert "GiB at most, but this machine has 0.0 GiB; choose quantization" in said


def test_option_and_flag_that_contradict_each_other(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--model", str(checkpoint), "--option"]
    assert main([*words, "device=cuda", "--device", "cpu"]) == 2
    said = "sensorium: error: --device cpu and --option device=cuda set the same option; give one of them\n"
    assert capsys.readouterr() == ("", said)
    assert main([*words, "model=other"]) == 2
    assert f"--model {checkpoint} and --option model=other" in capsys.readouterr().err
    assert main([*words, "device=cpu"]) == 0
    assert sections(capsys.readouterr().out)["device"]["device"] == "cpu"


def test_no_video_fits(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(checkpoint), "--device", "cpu", "--option", "max_model_len=8"]) == 0
    found = sections(capsys.readouterr().out)["memory"]
    assert found["largest video"] == "no video of 1280x720 pixels fits, limited by max_model_len"


def test_note_on_float16_on_a_cpu(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "half")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    for dtype, runs, noted in (("auto", "float32", True), ("float16", "float16", False)):
        assert main(["doctor", "--model", str(folder), "--device", "cpu", "--option", f"dtype={dtype}"]) == 0
        found = sections(capsys.readouterr().out)["checkpoint"]
        assert found["dtype"] == runs
        assert ("it runs in float32" in found.get("note", "")) == noted


def test_an_error_of_a_checkpoint_is_a_problem(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "half")
    (folder / "tokenizer.json").unlink()
    assert main(["doctor", "--model", str(folder), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert f"sensorium: error: {sections(out)['problems']['tokenizer']}\n" == err
    assert "tokenizer" in err


def test_every_broken_part_of_a_checkpoint_is_listed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "broken")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("[")
    (folder / "chat_template.jinja").write_text("{% if %}")
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["doctor", "--model", str(folder), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    found = sections(out)["problems"]
    assert found.keys() == {"generation_config.json", "weights", "chat template", "tokenizer"}
    assert "is not valid JSON" in found["generation_config.json"]
    assert "is not readable safetensors" in found["weights"]
    assert "the chat template cannot be compiled" in found["chat template"]
    assert err == "".join(f"sensorium: error: {text}\n" for text in found.values())
    assert "checkpoint" not in sections(out)


def test_a_folder_without_weights_is_a_problem_beside_its_report(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "empty")
    (weights,) = folder.glob("*.safetensors")
    weights.unlink()
    assert main(["doctor", "--model", str(folder), "--device", "cpu", "--option", "max_model_len=512"]) == 2
    out, err = capsys.readouterr()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor an index") as caught:
        LLM(folder, device="cpu", max_model_len=512)
    assert err == f"sensorium: error: {caught.value}\n"
    assert sections(out)["problems"] == {"weights": str(caught.value)}
    assert "total" in sections(out)["memory"]
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["doctor", "--model", str(folder), "--device", "cpu"]) == 2
    lacking = sections(capsys.readouterr().out)["problems"]["weights"]
    assert lacking == f"{folder} holds an index, but none of its 2 weight files; download them"


def test_what_can_be_checked_beside_a_broken_config_is(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["UnknownForCausalLM"]}))
    (folder / "tokenizer.json").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (weights,) = folder.glob("*.safetensors")
    weights.rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["doctor", "--model", str(folder), "--device", "cpu"]) == 2
    found = sections(capsys.readouterr().out)["problems"]
    assert found.keys() == {"weights", "tokenizer", "architecture"}
    assert "lacks 1 of its 2 weight files (model-2.safetensors); download them again" in found["weights"]


@pytest.mark.parametrize("files", [(), ("README.md", "Makefile")])
def test_a_folder_without_a_checkpoint_is_one_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, ...]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err == f"sensorium: error: {tmp_path} has no config.json; it is not a checkpoint in the Hub's layout\n"


def test_remote_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "auto_map": {"AutoModel": "x.X"}}))
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "auto_map" in capsys.readouterr().err


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    installed = doctor.version
    gone = {"soxr", "triton"}
    monkeypatch.setattr(doctor, "version", lambda name: None if name in gone else installed(name))
    assert main(["doctor"]) == 1
    found = sections(capsys.readouterr().out)
    assert found["packages"]["soxr"] == "MISSING: pip install soxr"
    assert "sensorium[gpu]" in found["optional"]["triton"]
    assert {"prometheus-client", "opentelemetry-sdk"} <= found["optional"].keys()


def test_required_packages_are_those_of_the_metadata() -> None:
    assert {"torch", "numpy", "pillow", "opencv-python-headless", "tokenizers"} <= set(doctor.required())
    assert "pytest" not in doctor.required()


def test_a_codec_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """A package whose decoder fails in the worker, as one of a new major version may, is named with its modality."""
    assert decoding.decoding_problems() == []
    (tmp_path / "soundfile.py").write_text("def SoundFile(*args):\n    raise KeyError('gone')\nLibsndfileError = OSError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["doctor", "--device", "cpu"]) == 1
    found = sections(capsys.readouterr().out)["problems"]
    assert list(found) == ["audio"]
    assert "speech/alarm.flac is not decoded (KeyError: 'gone')" in found["audio"]
    assert re.search(r'pip install --force-reinstall --no-deps "soundfile[<>=.,0-9]+" "soxr[<>=.,0-9]+"', found["audio"])


def test_a_machine_that_is_busy_is_no_reason_to_install_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*args: object) -> None:
        raise BusyError("the worker got too little processor time")

    monkeypatch.setattr(gate, "probe", starved)
    problems = dict(decoding.decoding_problems())
    assert problems["video"] == "media/clip.mp4 could not be tried: the worker got too little processor time"
    assert list(problems) == ["image", "video", "audio"]


@pytest.mark.parametrize(
    ("compiler", "advice"), [("/no/c++", "Install a C++ compiler (apt-get install g++), then build them"), ("sh", "Build them")]
)
def test_missing_kernels_are_a_problem(monkeypatch: pytest.MonkeyPatch, capsys, compiler: str, advice: str) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(installation, "has_kernels", lambda package: False)
    monkeypatch.setattr(installation, "_source", lambda: {"url": "file:///a/b", "dir_info": {}})
    monkeypatch.setattr(installation, "COMPILERS", {"sh": "apt-get install g++"})
    monkeypatch.setenv("CXX", compiler)
    assert main(["doctor", "--device", "cpu"]) == 0
    problem = sections(capsys.readouterr().out)["problems"]["C++ kernels"]
    command = "pip install --force-reinstall --no-deps --no-cache-dir /a/b"
    assert problem == f"not built, so torch runs in their place, several times slower. {advice}: {command}"


def test_missing_kernels_are_no_problem_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(EngineConfig, "torch_device", torch.device("cuda"))
    assert installation_problems("cuda") == []
