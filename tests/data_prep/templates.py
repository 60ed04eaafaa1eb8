"""Tokenizers whose template adds BOS before a text, or EOS after it."""

import json
import shutil
from pathlib import Path

BOS = "<bos>"


def with_template(source: Path, directory: Path, before: bool, after: bool) -> Path:
    """Copy a byte-level tokenizer, with a BOS token and a template that adds BOS or EOS."""
    shutil.copytree(source, directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    bos_id = 1 + max(
        [*content["model"]["vocab"].values(), *(each["id"] for each in content["added_tokens"])]
    )
    eos = content["added_tokens"][0]
    content["added_tokens"].append({**eos, "id": bos_id, "content": BOS})
    begin, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in (BOS, eos["content"]))
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    single = [*[begin] * before, text[0], *[end] * after]
    ids = {BOS: bos_id, eos["content"]: eos["id"]}
    content["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False,
             "use_regex": True},
            {"type": "TemplateProcessing", "single": single, "pair": [*single, text[1]],
             "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}
                                for name, number in ids.items()}},
        ],
    }  # fmt: skip
    path.write_text(json.dumps(content))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": BOS}))
    return directory
