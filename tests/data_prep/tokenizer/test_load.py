"""`load_tokenizer`: the saved copy gives the ids of transformers and tiktoken."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import tiktoken
import tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer

from data_prep.tokenizer.encoders import load_encoder
from data_prep.tokenizer.load import load_tokenizer
from tests.data_prep.small_corpus import TEXTS
from zerolm.common.errors import ConfigError
from zerolm.data.window_text import load_decoder
from zerolm.evaluate.text_coder import TextCoder


def change(directory, target, file="tokenizer_config.json", **keys):
    """Copy a tokenizer directory with some keys of a file changed."""
    shutil.copytree(directory, target)
    content = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps({**content, **keys}))
    return target


def copy_of(tokenizer, target):
    entry = tokenizer.write_copy(target)
    assert {each["file"] for each in entry["files"]} == {
        path.name for path in target.iterdir() if path.is_file()
    }
    return target


def ids_of(copy, texts) -> list[list[int]]:
    """Return the ids of each document as the saved copy gives them."""
    return [ids.tolist() for ids in load_encoder(copy).encode(texts).ids]


def reference_ids(directory, texts) -> list[list[int]]:
    """Return the ids of each document as transformers gives them."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [
        tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        for text in texts
    ]


def test_ids_are_those_of_transformers(tmp_path, tokenizer_directory):
    tokenizer = load_tokenizer(str(tokenizer_directory))
    ids = ids_of(copy_of(tokenizer, tmp_path / "copy"), TEXTS)
    assert ids == reference_ids(tokenizer_directory, TEXTS)
    decode = load_decoder(tmp_path / "copy")
    assert [decode(each) for each in ids] == TEXTS


@pytest.mark.parametrize("keys", [{}, {"add_prefix_space": False}], ids=["plain", "transformers"])
def test_byte_order_marks_change_nothing(tmp_path, tokenizer_directory, keys):
    """Editors of Windows write them; no library reads JSON that has one."""
    marked = change(tokenizer_directory, tmp_path / "marked", **keys)
    expected = load_tokenizer(str(change(tokenizer_directory, tmp_path / "plain", **keys)))
    for path in marked.glob("*.json"):
        path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    tokenizer = load_tokenizer(str(marked))
    assert (tokenizer.name, tokenizer.fingerprint) == (str(marked), expected.fingerprint)
    copy = copy_of(tokenizer, tmp_path / "copy")
    assert ids_of(copy, TEXTS) == reference_ids(tokenizer_directory, TEXTS)
    assert not any(path.read_bytes().startswith(b"\xef") for path in copy.iterdir())


def test_loading_without_transformers_agrees_with_transformers(tmp_path, tokenizer_directory):
    """The same tokenizer, once with a key that only transformers interprets."""
    quick = load_tokenizer(str(tokenizer_directory))
    changed = change(tokenizer_directory, tmp_path / "changed", padding_side="left")
    slow = load_tokenizer(str(changed))
    assert quick.save.__name__ == "<lambda>" and slow.save.__name__ == "save_pretrained"
    reference = AutoTokenizer.from_pretrained(tokenizer_directory)
    for each in (quick, slow):
        assert (each.vocab_size, each.eos_id) == (len(reference), reference.eos_token_id)
    assert quick.fingerprint == slow.fingerprint
    ids = ids_of(copy_of(slow, tmp_path / "copy"), TEXTS)
    assert ids == ids_of(copy_of(quick, tmp_path / "other"), TEXTS)


def file_ids(directory, texts) -> list[list[int]]:
    """Return the ids of each text as the library `tokenizers` gives them for tokenizer.json."""
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.encode_special_tokens = True
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


CLASSES = ("Qwen2Tokenizer", "GPTNeoXTokenizer", "PreTrainedTokenizerFast")


@pytest.mark.parametrize("name", CLASSES)
def test_ids_are_those_of_tokenizer_json_whatever_its_class_does(
    tmp_path, tokenizer_directory, name
):
    directory = change(
        tokenizer_directory, tmp_path / "given", tokenizer_class=name, padding_side="left"
    )
    texts = [*TEXTS, "The 2024", " e\u0301", "don't STOP\n\n  now"]
    expected = file_ids(directory, texts)
    tokenizer = load_tokenizer(str(directory))
    copy = copy_of(tokenizer, tmp_path / "copy")
    assert ids_of(copy, texts) == expected
    coders = [TextCoder(each) for each in (directory, copy)]
    plain = [text for text in texts if "<" not in text]
    for coder in coders:
        assert [coder.encode(text, False) for text in plain] == file_ids(directory, plain)
    text = " e\u0301"  # which these classes normalize
    [ids], [[*of_class]] = file_ids(directory, [text]), reference_ids(directory, [text])
    said = f"{name}, which replaces its "
    shown = f": {text!r} is {of_class}, but {ids} with tokenizer.json. "
    assert [said in each and shown in each for each in tokenizer.notices] == [True] * (
        ids != of_class
    )
    assert [coder.notices for coder in coders] == [list(tokenizer.notices), []]
    assert (ids != of_class) == (name != "PreTrainedTokenizerFast")


def ids_of_version_4(directory, texts) -> list[list[int]]:
    """Return the ids of each text as transformers 4.57 gives them for a directory.

    Source: `PreTrainedTokenizerFast.__init__` of transformers 4.57.6, with which the result of this
    function was compared.
    """
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert isinstance(config.get("extra_special_tokens", {}), dict)
    content = json.loads((directory / "tokenizer.json").read_text())
    prefix = config.get("add_prefix_space", False)
    if content["pre_tokenizer"].get("add_prefix_space", prefix) != prefix:
        content["pre_tokenizer"]["add_prefix_space"] = prefix
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.add_special_tokens(config.get("additional_special_tokens", []))
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("changed", ["class", "prefix", "tokens", "class without transformers"])
def test_version_4_of_transformers_gives_the_ids_of_the_copy(
    tmp_path, tokenizer_directory, changed
):
    keys = {"tokenizer_class": "TokenizersBackend"}
    if "without" not in changed:
        keys["padding_side"] = "left"
    if changed == "tokens":
        keys["extra_special_tokens"] = ["<|user|>"]
    directory = change(tokenizer_directory, tmp_path / "given", **keys)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    if changed == "prefix":
        content["pre_tokenizer"]["add_prefix_space"] = True
        path.write_text(json.dumps(content))
    copy = copy_of(load_tokenizer(str(directory)), tmp_path / "copy")
    texts = ["one", "two words", "1 2024"]
    assert ids_of_version_4(copy, texts) == ids_of(copy, texts) == file_ids(directory, texts)
    if changed == "tokens":
        [[user]] = ids_of_version_4(copy, ["<|user|>"])
        assert user == AutoTokenizer.from_pretrained(copy).convert_tokens_to_ids("<|user|>")


def test_the_fingerprint_does_not_depend_on_how_the_file_is_written(tmp_path, tokenizer_directory):
    directory = tmp_path / "compact"
    shutil.copytree(tokenizer_directory, directory)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))))
    fingerprints = {
        load_tokenizer(str(each)).fingerprint for each in (directory, tokenizer_directory)
    }
    assert len(fingerprints) == 1


def test_the_fingerprint_changes_with_anything_that_changes_ids(tmp_path, tokenizer_directory):
    content = json.loads((tokenizer_directory / "tokenizer.json").read_text())
    merges = content["model"]["merges"]
    other_merges = {**content["model"], "merges": [merges[1], merges[0], *merges[2:]]}
    prefix = {**content["pre_tokenizer"], "add_prefix_space": True}
    prints = {load_tokenizer(str(tokenizer_directory)).fingerprint}
    for name, keys in (("model", other_merges), ("pre_tokenizer", prefix)):
        directory = change(
            tokenizer_directory, tmp_path / name, file="tokenizer.json", **{name: keys}
        )
        prints.add(load_tokenizer(str(directory)).fingerprint)
    assert len(prints) == 3


def test_truncation_and_padding_of_a_tokenizer_are_ignored(tmp_path, tokenizer_directory):
    truncation = {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    directory = change(
        tokenizer_directory,
        tmp_path / "cut",
        file="tokenizer.json",
        truncation=truncation,
        padding=padding,
    )
    copy = copy_of(load_tokenizer(str(directory)), tmp_path / "copy")
    assert ids_of(copy, TEXTS) == reference_ids(tokenizer_directory, TEXTS)
    backend = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    assert backend.truncation is None and backend.padding is None, "for other programs"


def test_tokens_added_by_the_config_are_counted(tmp_path, tokenizer_directory):
    directory = change(
        tokenizer_directory, tmp_path / "added", extra_special_tokens=["<|user|>", "<|bot|>"]
    )
    tokenizer = load_tokenizer(str(directory))
    assert tokenizer.vocab_size == len(AutoTokenizer.from_pretrained(directory)) == 302
    copy = copy_of(tokenizer, tmp_path / "copy")
    assert len(AutoTokenizer.from_pretrained(copy)) == 302


def test_vocab_size_covers_the_largest_id_if_ids_have_gaps(tmp_path, tokenizer_directory):
    content = json.loads((tokenizer_directory / "tokenizer.json").read_text())
    vocab = {token: (n if n < 299 else 4000) for token, n in content["model"]["vocab"].items()}
    model = {**content["model"], "vocab": vocab}
    directory = change(tokenizer_directory, tmp_path / "holes", file="tokenizer.json", model=model)
    assert load_tokenizer(str(directory)).vocab_size == 4001


def test_a_python_only_tokenizer_encodes_as_defined(tmp_path):
    """ByT5: bytes, three special ids first; Python only."""
    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    tokenizer = load_tokenizer(str(tmp_path / "byt5"))
    assert tokenizer.eos_id == 1
    copy = copy_of(tokenizer, tmp_path / "copy")
    texts = [text for text in TEXTS if "<" not in text]
    ids = ids_of(copy, texts)
    assert ids == [[byte + 3 for byte in text.encode()] for text in texts]
    assert [load_decoder(copy)(each) for each in ids] == texts


@pytest.fixture
def local_tiktoken(tmp_path, monkeypatch, tokenizer_directory) -> tiktoken.Encoding:
    """An encoding of local merges, registered as tiktoken's plug-ins are."""
    (tmp_path / "plugin" / "tiktoken_ext").mkdir(parents=True)
    (tmp_path / "plugin" / "tiktoken_ext" / "local.py").write_text(
        "RANKS = {bytes([n]): n for n in range(256)}\n"
        "for pair in ['th', 'the', 'he', 'la', 'laz', 'az', 'lazy', ' d', ' do', 'do']:\n"
        "    RANKS[pair.encode()] = len(RANKS)\n"
        "ENCODING_CONSTRUCTORS = {'local_test': lambda: {\n"
        "    'name': 'local_test', 'pat_str': r' ?\\p{L}+| ?[^\\s\\p{L}]+|\\s+',\n"
        "    'mergeable_ranks': RANKS, 'special_tokens': {'<|endoftext|>': 300}}}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "plugin"))
    for name in [name for name in sys.modules if name.startswith("tiktoken_ext")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", None)
    tiktoken.registry._available_plugin_modules.cache_clear()
    yield tiktoken.get_encoding("local_test")
    tiktoken.registry.ENCODINGS.pop("local_test", None)
    tiktoken.registry._available_plugin_modules.cache_clear()


def test_tiktoken_encodings_load_by_name_and_from_the_copy(tmp_path, local_tiktoken):
    """Loaded by name, then from the saved copy, which needs no network."""
    tokenizer = load_tokenizer("tiktoken:local_test")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (301, 300)
    copy = copy_of(tokenizer, tmp_path / "copy")
    ids = ids_of(copy, TEXTS)
    assert ids == [local_tiktoken.encode(text, disallowed_special=()) for text in TEXTS]
    assert [load_decoder(copy)(each) for each in ids] == TEXTS
    again = load_tokenizer(str(copy))
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocab_size, again.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./absent", "no such directory"),
        ("namespace/absent", "not a tokenizer directory, nor a hub id"),
        ("tiktoken:absent_base", "Known encodings: .*cl100k_base"),
        ("{tmp}", "not a tokenizer directory"),
        ("{tmp}/file", "is a file"),
        ("{tmp}/no-eos", "has no EOS token"),
        ("{tmp}/dropout", r"model\.dropout is 0\.1, so the same text gets different ids"),
        ("{tmp}/dropout-slow", r"model\.dropout is 0\.1"),
        ("{tmp}/other-eos", r"'<.endoftxt.>' is not in its vocabulary.* \"<.endoftext.>\""),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path, tokenizer_directory, name, message):
    (tmp_path / "file").write_text("{}")
    change(tokenizer_directory, tmp_path / "no-eos", eos_token=None)
    model = json.loads((tokenizer_directory / "tokenizer.json").read_text())["model"]
    sampling, file = {**model, "dropout": 0.1}, "tokenizer.json"
    slow = change(tokenizer_directory, tmp_path / "slow", pad_token="<|endoftext|>", split=1)
    change(tokenizer_directory, tmp_path / "dropout", file=file, model=sampling)
    change(slow, tmp_path / "dropout-slow", file=file, model=sampling)
    change(tokenizer_directory, tmp_path / "none", file=file, model={**model, "dropout": 0.0})
    expected = load_tokenizer(str(tokenizer_directory)).vocab_size
    assert load_tokenizer(str(tmp_path / "none")).vocab_size == expected
    change(tokenizer_directory, tmp_path / "other-eos", eos_token="<|endoftxt|>")
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(name.format(tmp=tmp_path))


def test_a_normalizer_that_multiplies_text_is_refused(tmp_path, tokenizer_directory):
    def replacing(content: str) -> dict:
        return {"type": "Replace", "pattern": {"String": "a"}, "content": content}

    chain = {"type": "Sequence", "normalizers": [replacing("b" * 40), replacing("a" * 40)]}
    for number, normalizer in enumerate((replacing("b" * 100_000), chain)):
        target = tmp_path / str(number)
        change(tokenizer_directory, target, "tokenizer.json", normalizer=normalizer)
        with pytest.raises(ConfigError, match=r"normalizer: replaces a character by up to 1"):
            load_tokenizer(str(target))
    target = change(
        tokenizer_directory, tmp_path / "few", "tokenizer.json", normalizer=replacing("bb")
    )
    assert load_tokenizer(str(target)).vocab_size


def test_the_hub_is_asked_once_for_a_name_that_is_no_directory(tmp_path):
    """Nothing listens there; the client itself would try each of several files five times."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    code = "from data_prep.tokenizer.load import load_tokenizer; load_tokenizer('tokeniser')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr.startswith("tokeniser: no local file has this name; asking the hub, http")
    assert "nor a hub id that can be loaded (ConnectError: " in done.stderr
    assert "Retrying" not in done.stderr
