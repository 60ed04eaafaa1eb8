"""Encodings: files of other encodings give the text that was written."""

import gzip

import pytest

from data_prep.files.documents import InputRules
from data_prep.files.encodings import encoding_problems
from data_prep.read.bad_input import summary_lines
from data_prep.read.work_units import inputs_fingerprint, plan_units
from tests.data_prep.read.small_inputs import find, read_all, read_resuming
from zerolm.common.errors import ConfigError

FRENCH = "L’été dernier, j’ai rencontré un élève très fâché à l’école, qui préférait les œuvres.\n"
RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю. Погода сегодня хорошая.\n"
TEXTS = {
    "cp1252": FRENCH,
    "cp1250": "Zażółć gęślą jaźń. Książka leży na stole, a źdźbło trawy rośnie obok ścieżki.\n",
    "cp1251": RUSSIAN,
    "koi8-r": RUSSIAN,
    "shift_jis": "今日は天気がいいので、公園へ散歩に行きました。とても楽しかったです。\n",
    "euc_jp": "今日は天気がいいので、公園へ散歩に行きました。とても楽しかったです。\n",
    "gb18030": "今天天气很好，我们一起去公园散步。孩子们在草地上玩耍，老人们在树下下棋聊天。\n",
    "big5": "今天天氣很好，我們一起去公園散步。孩子們在草地上玩耍，老人們在樹下下棋聊天。\n",
    "cp949": "오늘은 날씨가 좋아서 공원에 산책을 갔습니다. 아이들은 풀밭에서 놀고 있었습니다.\n",
    "utf-16": FRENCH,
    "utf-32": RUSSIAN,
    "utf-8-sig": FRENCH,
    "utf-8": RUSSIAN,
}


def read(paths, encoding="auto", **rules):
    rules = InputRules(encoding=encoding, **rules)
    return read_all(find(paths, rules), rules, chunk_bytes=3000)


def test_auto_reads_what_was_written(tmp_path):
    paths = []
    for number, (name, text) in enumerate(TEXTS.items()):
        for repeated in (1, 400):
            paths.append(tmp_path / f"{number:02}-{repeated}.txt.gz")
            data = (text * repeated).encode(name)
            paths[-1].write_bytes(gzip.compress(data))
    late = tmp_path / "late.txt"  # ASCII for longer than any block
    late.write_bytes(("x" * 99 + "\n").encode() * 9000 + TEXTS["cp1252"].encode("cp1252"))
    documents, tally = read([*paths, late])
    expected = [text * repeated for text in TEXTS.values() for repeated in (1, 400)]
    assert [each.text for each in documents[:-1]] == expected
    assert documents[-1].text.endswith(FRENCH)
    lines = "\n".join(summary_lines([], tally, InputRules()))
    assert (
        "decoded: 5 documents from cp1252" in lines or "documents decoded from cp1252: 3" in lines
    )
    assert sum(tally.changed.values()) == 2 * 11 + 1


def test_a_named_encoding_is_obeyed_and_its_errors_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXTS["koi8-r"].encode("koi8-r"))
    assert read([path], "koi8-r")[0][0].text == RUSSIAN
    assert read([path], "cp1251")[0][0].text != RUSSIAN  # wrong, as was asked
    path.write_bytes(FRENCH.encode("utf-16")[:-1])
    with pytest.raises(ConfigError, match=r"a\.txt:1: not utf-16. Name its encoding"):
        read([path], "utf-16")
    path.write_bytes(bytes(range(128, 256)) * 3 + b"\0\1\2\3" * 99)
    with pytest.raises(ConfigError, match="its encoding cannot be detected from its content"):
        read([path])
    with pytest.raises(ConfigError, match="Name its encoding with --encoding"):
        read([path], "utf-8")


GOOD = '{"text": "naïve %d"}\n'


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt", "jsonl.gz"])
@pytest.mark.parametrize(
    ("encoding", "codec", "bad"),
    [("utf-8", "utf-8", b"\xe9"), ("UTF-8", "utf-8", b"\xe9"), ("U8", "utf-8", b"\xe9"),
     ("utf-8-sig", "utf-8-sig", b"\xe9"), ("cp1252", "cp1252", b"\x81"),
     ("utf-16", "utf-16", b"\x00\xd8"), ("Shift-JIS", "shift_jis", b"\x80"),
     ("auto", "utf-8", b"\xe9"), ("auto", "utf-8-sig", b"\xe9")],
)  # fmt: skip
def test_a_bad_line_costs_only_itself_however_its_codec_is_spelled(
    tmp_path, suffix, encoding, codec, bad
):
    """201 documents and one line that is not of the encoding, in the first block."""
    plain = GOOD.replace("ï", "i") if codec == "shift_jis" else GOOD
    if suffix == "csv":
        plain = "naive %d\n" if codec == "shift_jis" else "naïve %d\n"
    lines = [plain % n for n in range(201)]
    head = "text\n" if suffix == "csv" else ""
    before = (head + lines[0]).encode(codec)
    rest = "".join(lines[1:]).encode(codec.removesuffix("-sig"))
    line_end = "\n".encode(codec)
    if codec == "utf-16":
        rest, line_end = rest[2:], line_end[2:]
    content = before + bad + line_end.removeprefix(b"\xef\xbb\xbf") + rest
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    documents, tally = read([path], encoding, on_bad_input="skip")
    reason = "not_utf8" if codec.startswith("utf-8") else "encoding"
    assert tally.bad == {reason: 1}
    texts = [plain.strip().removeprefix('{"text": "').removesuffix('"}') % n for n in range(201)]
    assert [each.text for each in documents] == ([] if suffix == "txt" else texts)
    with pytest.raises(ConfigError, match=rf"a\.{suffix}:{3 if suffix == 'csv' else 2}: not "):
        read([path], encoding)


def test_auto_looks_at_the_last_bytes(tmp_path):
    """Of a character that UTF-8 would continue."""
    path = tmp_path / "a.txt"
    for text, codec in ((FRENCH + "fâché", "cp1252"), (RUSSIAN[:-2], "cp1251")):
        path.write_bytes(text.encode(codec))
        documents, tally = read([path])
        assert documents[0].text == text and tally.changed == {f"from {codec}": 1}


def test_lines_in_another_encoding_resume_after_any_batch(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes("".join(f'{{"text": "{n} é"}}\n' for n in range(20_000)).encode("utf-16"))
    rules = InputRules(encoding="auto")
    inputs = find([path], rules)
    assert len(plan_units(inputs, 1000)) == 1
    documents, _ = read_resuming(inputs, rules, chunk_bytes=9000, samples=9)
    assert [each.text for each in documents] == [f"{n} é" for n in range(20_000)]


@pytest.mark.parametrize("name", ["nope", "idna", "punycode"])
def test_an_encoding_that_cannot_be_read_is_refused(tmp_path, name):
    """Unknown ones also where the header of a table is read before the flags are refused."""
    (tmp_path / "a.csv").write_text("id,text\n1,a\n")
    with pytest.raises(ConfigError, match=rf"a\.csv: is not {name} \("):
        read([tmp_path / "a.csv"], name)


def test_the_encoding_is_checked_and_part_of_the_fingerprint(tmp_path):
    assert not list(encoding_problems("latin9"))
    for name in ("base64", "utf-9", "\0"):
        assert "is not auto or the name" in dict(encoding_problems(name))["encoding"]
    (tmp_path / "a.txt").write_text("a")
    keys = set()
    for encoding in ("utf-8", "auto", "cp1252"):
        rules = InputRules(encoding=encoding)
        keys.add(inputs_fingerprint(find([tmp_path], rules), rules))
    assert len(keys) == 3
