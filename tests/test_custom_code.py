"""No call in the code of this project lets a model, a tokenizer or a file bring code along."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

FOLDERS = ("zerolm", "launch", "data_prep", "benchmarks")
FILES = [ROOT / "pretrain.py", *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
# Method or function, and the argument that it must be given.
REQUIRED = {
    "from_pretrained": ("trust_remote_code", False),
    "from_config": ("trust_remote_code", False),
    "HFLM": ("trust_remote_code", False),
}
REQUIRED_OF_MODULE = {("torch", "load"): ("weights_only", True)}
OURS = {"Model", "cls"}  # whose `from_config` is not that of transformers
FORBIDDEN = {
    ("pickle", "load"),
    ("pickle", "loads"),
    ("transformers", "pipeline"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
}
FORBIDDEN_ARGUMENTS = {"trust_remote_code": True, "allow_pickle": True, "weights_only": False}


def trees(path: Path) -> Iterator[tuple[ast.AST, int]]:
    """Yield the syntax tree of a file, and those of the programs in its strings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield tree, 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "(" in node.value:
            try:
                yield ast.parse(node.value), node.lineno - 1
            except (SyntaxError, ValueError):
                continue


def unsafe_calls(path: Path) -> Iterator[str]:
    for tree, offset in trees(path):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            where = f"{path.relative_to(ROOT)}:{node.lineno + offset}: {ast.unparse(node)}"
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ""
            name = function.id if isinstance(function, ast.Name) else name
            owner = getattr(getattr(function, "value", None), "id", "")
            given = {
                each.arg: each.value.value
                for each in node.keywords
                if isinstance(each.value, ast.Constant)
            }
            needed = REQUIRED_OF_MODULE.get((owner, name)) or REQUIRED.get(name)
            if needed and owner not in OURS and given.get(needed[0]) is not needed[1]:
                yield f"{where}: {needed[0]}={needed[1]} is missing"
            if (owner, name) in FORBIDDEN or name == "pipeline":
                yield f"{where}: may run code of its input"
            for key, value in FORBIDDEN_ARGUMENTS.items():
                if given.get(key) is value:
                    yield f"{where}: {key}={value}"


def test_every_call_that_loads_refuses_the_code_of_its_input():
    assert len(FILES) > 250
    assert not [line for path in FILES for line in unsafe_calls(path)]


@pytest.mark.parametrize(
    "line",
    [
        "AutoTokenizer.from_pretrained(path)",
        "AutoModelForCausalLM.from_config(config, dtype=dtype)",
        "AutoConfig.from_pretrained(path, trust_remote_code=flag)",
        "HFLM(pretrained=model)",
        "torch.load(path, mmap=True)",
        "pickle.loads(content)",
        "np.load(path, allow_pickle=True)",
        'PROGRAM = "import x; AutoTokenizer.from_pretrained(x.path)"',
    ],
)
def test_such_a_call_would_be_found(line, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_custom_code.ROOT", tmp_path)
    (tmp_path / "module.py").write_text(line)
    assert len(list(unsafe_calls(tmp_path / "module.py"))) == 1
