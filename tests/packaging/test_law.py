"""Rules beyond import-linter. Each test walks every file of the package and lists all offenders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from inspect import isabstract
from pathlib import Path

import sensorium
from package_list import packages
from sensorium.models.families.dual_encoder.model import DualEncoder
from sensorium.models.families.ovis.model import OvisModel
from sensorium.models.registry import native_architectures
from sensorium.models.text.stacks import STACKS
from sensorium.models.vision.encoders import DEFAULTS

ARCHITECTURES = native_architectures()

ROOT = Path(__file__).parents[2]
ROOMS = ("callers", "checkpoints", "cli", "engine", "kernels", "mm", "models", "pipelines", "processors", "server")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
NEVER = {"transformers", "torchvision", "librosa", "matplotlib", "pickle", "sensorium"}
"""Test-only packages, pickle, and our own absolute name: the package imports itself relatively."""
MAY = {("models/fallback/borrowed.py", "transformers"), ("processors/fallback/fallback.py", "transformers")}
MAY |= {("pipelines/speech/forced_alignment.py", "transformers")}
MAY |= {("cli/bench/report.py", "matplotlib")}
"""Files that run transformers' own classes, or make plots if matplotlib is installed."""

FAMILIES = {row.family for row in ARCHITECTURES.values()}
TABLES = (
    "models/registry.py", "models/text/stacks.py", "models/text/stack_defaults.py",
    "models/vision/encoders.py",
    "checkpoints/gguf/architectures.py", "checkpoints/gguf/images.py",  # llama.cpp's names of them
    "checkpoints/gguf/tokenizer_rules.py",
    "server/parsers/vllm_names.py",  # values of a flag of vLLM
    "models/vllm_architectures.py",  # names of its classes
    "processors/sentence_transformers.py",  # names of its files
)  # fmt: skip
SHARED = [
    path
    for path in FILES
    if path.relative_to(ROOT).as_posix() not in TABLES and path.parent.parent != ROOT / "models" / "families"
]
"""All files except those of families and the tables of published defaults."""
NAMES = {name.replace("_", "").lower() for name in (*FAMILIES, *ARCHITECTURES)}
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^A-Za-z0-9_]")
"""A word of an identifier, or a character between identifiers: `KeyError` has two, `qwen2_vl` and `Qwen2VL` three."""
MOST = max(len(PART.findall(name)) for name in (*FAMILIES, *ARCHITECTURES))
KEYS = ("llama_4_scaling", "use_whisper_feature", "whisper-large-v3")  # of published configs of other families
KINDS = {"model_type", *STACKS, *DEFAULTS}
WRITES = {
    ("checkpoints/consolidated.py", "model_type"),
    ("checkpoints/consolidated.py", "mistral"),
    ("checkpoints/consolidated.py", "mixtral"),
    ("checkpoints/consolidated.py", "mistral4"),
}
"""This reader of a publisher's own layout writes a config in the Hub's layout."""
WRITES |= {("models/fallback/borrowed.py", "model_type")}  # compares the config with transformers' class
WRITES |= {("checkpoints/tokenizers/files.py", "model_type")}  # SigLIP's tokenizer files do not say that it lowercases
# a layer type of hybrid decoders, and the name of their layers in checkpoints
WRITES |= {(f"models/text/{file}.py", "mamba") for file in ("attention_config", "decoder_config", "spec")}
WRITES |= {("engine/vllm_args.py", "mistral")}  # a value of vLLM's load_format, config_format and tokenizer_mode


def imports(path: Path) -> Iterator[str]:
    """Yield imported names anywhere in the file; relative ones as paths below the root, with `.` for the root itself."""
    here = path.relative_to(ROOT).parent.parts
    for node in ast.walk(parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
            yield ".".join(["", *filter(None, base)]) or "."
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports() -> None:
    found = []
    for path in FILES:
        for name in imports(path):
            package = name.split(".")[0]
            if name == "." or (package in NEVER and (name_of(path), package) not in MAY):
                found.append(f"{name_of(path)} imports {'the root package' if name == '.' else name}")
    assert not found, "\n".join(found)


def test_no_torch_load() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
    ]
    assert not found, "\n".join(found)


def test_functions_beside_kernels_reuse_no_imported_name() -> None:
    """In a file of Triton functions, a local variable that has the name of an imported function hides it."""
    found = []
    for path in (path for path in FILES if path.is_relative_to(ROOT / "kernels")):
        tree = parse(path.read_text("utf-8"))
        names = {one.asname or one.name for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names}
        stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        found += [f"{name_of(path)}:{node.lineno} {node.id}" for node in stored if node.id in names]
    assert not found, "\n".join(found)


def test_size() -> None:
    """A function has fewer than 60 lines."""
    found = []
    for path in FILES:
        for node in ast.walk(parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # The documented arguments of a Triton kernel do not count.
                kernel = any(ast.unparse(one).startswith("triton.jit") for one in node.decorator_list)
                begin = node.body[0].lineno if kernel else node.lineno
                if (node.end_lineno or begin) - begin >= 60:
                    found.append(f"{name_of(path)}: {node.name}")
    assert not found, "\n".join(found)


def test_class_names() -> None:
    """No two classes have the same name, unless one derives from the other (`LLM` of pipelines from that of engine)."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(parse(path.read_text("utf-8"))):
            derived = isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith(f".{node.name}") for base in node.bases)
            if isinstance(node, ast.ClassDef) and not derived:
                places.setdefault(node.name, []).append(name_of(path))
    twice = [f"{name} is in {' and '.join(files)}" for name, files in places.items() if len(files) > 1]
    assert not twice, "\n".join(twice)


def test_inheritance() -> None:
    """A class has at most three ancestors of ours in a line."""
    bases: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                own = {ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases}
                bases.setdefault(node.name, set()).update(own - {node.name})

    def ancestors(name: str) -> int:
        return max((1 + ancestors(base) for base in bases[name] if base in bases), default=0)

    assert not [name for name in bases if ancestors(name) > 3]


def test_methods_that_subclasses_define_are_abstract() -> None:
    """A class that lacks such a method cannot be made: the method is abstract, in a class whose metaclass checks it."""
    found = []
    for path in FILES:
        for node in ast.walk(parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc):
                found.append(f"{name_of(path)}:{node.lineno} raises NotImplementedError")
    assert not found, "\n".join(found)
    for kind in (DualEncoder, OvisModel):
        assert isabstract(kind), kind


def words(path: Path) -> Iterator[tuple[str, int]]:
    """Yield names and strings of a file with their lines; docstrings are excluded, because they may mention families."""
    tree = parse(path.read_text("utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value, node.lineno
        elif isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((name, node.lineno) for alias in node.names for name in (alias.name, getattr(node, "module", "") or ""))


@cache
def _names_family(word: str) -> bool:
    """Return True if whole words of an identifier are the name of a family, as in `of_gemma3`, but not in `KeyError` (keye)."""
    parts = [part.lower() for part in PART.findall(word)]
    runs = ("".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, min(len(parts), i + MOST) + 1))
    return any(run in NAMES for run in runs) and not any(key in word for key in KEYS)


def families_in(path: Path, name: str) -> list[str]:
    """List forbidden words of a shared file: families, architectures, kinds of stacks or towers, and the key of kinds."""
    found = [(word, line) for word, line in words(path) if word in KINDS and (name, word) not in WRITES]
    found += [(word, line) for word, line in words(path) if _names_family(word)]
    return [f"{name}:{line} says {word!r}" for word, line in found]


def test_no_family_in_a_shared_file() -> None:
    found = [line for path in SHARED for line in families_in(path, name_of(path))]
    assert not found, "\n".join(found)


def test_a_family_in_a_shared_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "shared.py"
    said = ("if kind == 'qwen2_vl': pass", "config['model_type']", "from .llava import Llava", "class WhisperLike: pass")
    more = ("import a.pixtral", "x = {'siglip_vision_model': 1}", "def of_gemma3(): pass", "y.ultravox", "is_keye2 = 1")
    for text in (*said, *more):
        path.write_text(text)
        assert families_in(path, "shared.py"), text
    documented = '"""For Whisper."""\n# and LLaVA\nmodel_types = "qwen"'
    for text in (documented, "raise KeyError", "class KeyEvent: pass", "variance, provision"):
        path.write_text(text)
        assert not families_in(path, "shared.py"), text


def test_every_package_is_looked_at() -> None:
    """Every package that the build backend finds is checked."""
    listed = packages()
    assert {ROOT.joinpath(*name.split(".")[1:]) for name in listed} == {ROOT, *(path.parent for path in FILES)}


def test_public_names_are_documented() -> None:
    for name in sensorium.__all__:
        assert name == "__version__" or getattr(sensorium, name).__doc__
