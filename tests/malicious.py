"""Tokenizers and models that bring Python code along, which leaves a mark if it is executed."""

import json
from pathlib import Path
from typing import Any

from tests.launching import LLAMA

CODE = "from pathlib import Path\nPath({mark!r}).touch()\nclass Custom: pass\n"
AUTO_MAP = {
    "AutoConfig": "custom.Custom",
    "AutoModelForCausalLM": "custom.Custom",
    "AutoTokenizer": ["custom.Custom", "custom.Custom"],
}


def add_code(directory: Path, mark: Path, model_type: str = "custom") -> Path:
    """Make a directory's config and tokenizer refer to code that creates `mark`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "custom.py").write_text(CODE.format(mark=str(mark)))
    generate = directory / "custom_generate" / "generate.py"
    generate.parent.mkdir(exist_ok=True)
    generate.write_text(CODE.format(mark=str(mark)) + "def generate(model, **_): pass\n")
    change(directory / "config.json", {"auto_map": AUTO_MAP, "model_type": model_type})
    change(directory / "tokenizer_config.json", {"auto_map": AUTO_MAP, "tokenizer_class": "Custom"})
    return directory


def change(file: Path, values: dict[str, Any]) -> Path:
    """Change keys of a JSON file, which is created if absent."""
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**old, **values}))
    return file


def model_config(directory: Path, mark: Path, model_type: str) -> Path:
    directory.mkdir(parents=True)
    change(directory / "config.json", LLAMA)
    return add_code(directory, mark, model_type)
