"""Damage to valid files, drawn by hypothesis: what editors, disks and other programs leave of them.

JSON is changed in its structure, and any file in its bytes. Draws shrink towards less damage.
"""

import copy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from zerolm.checkpoint.manifest import manifest_digest

NOISE = "<raw{}>"  # in a JSON string: replaced, with its quotes, by text that need not be JSON
TWICE = "<twice>"  # before a key that is then there twice
RAW = [
    "NaN", "1e999", "-Infinity", "-0.0", "9223372036854775808", "1" * 400, '"\\ud800"',
    '{"a": 1, "a": 2}', "", "nul", "'a'", "[" * 300 + "]" * 300, "[" * 990 + "]" * 990,
    '{"a":' * 5000 + "1" + "}" * 5000, "[" * 100_000,
]  # fmt: skip
TEXTS = [
    "", "text", "auto", "true", "1", "../../x", "/dev/zero", "a\0b", "\u001b[31m\n", "\u009b2J",
    "\u202eabc", "\u2028", "step-00000099", "9" * 50, "x" * 70_000, "é" * 300, "{0}%s$HOME", "-1",
    "<script>alert(1)</script>",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**62, 10**12, 10**30, 0.5, -2.5, 1e-300, 1e300,
    *TEXTS, [], [1], [[0, 0]], [None], {}, {"a": 1}, [[]] * 3, {"": {}}, [{"rank": "0"}],
    ["a", 1], list(range(2000)),
]  # fmt: skip
MAX_EDITS = 4
DEPTHS = (2, 60, 150)


@dataclass(frozen=True)
class Damage:
    """A change of one file; `name` is its path relative to the directory."""

    name: str
    what: str
    apply: Callable[[Path], object]

    def __repr__(self) -> str:
        return f"{self.name}: {self.what}"


def written(name: str, what: str, content: bytes) -> Damage:
    """Return damage that replaces the content of a file."""
    return Damage(name, what, partial(Path.write_bytes, data=content))


@st.composite
def damages(draw: st.DrawFn, base: Path, names: Sequence[str]) -> Damage:
    """Draw damage to one of the files."""
    name = draw(st.sampled_from(names))
    content = (base / name).read_bytes()
    kinds = ["bytes", "bytes", "object"]
    kinds = ["json"] * 8 + kinds if name.endswith((".json", ".jsonl")) else kinds
    kind = draw(st.sampled_from(kinds))
    if kind == "object":
        return Damage(name, *draw(st.sampled_from(list(OBJECTS.items()))))
    changed = _changed_json(content, name) if kind == "json" else _changed_bytes(content)
    return written(name, *draw(changed))


# ---- Bytes


@st.composite
def _changed_bytes(draw: st.DrawFn, content: bytes) -> tuple[str, bytes]:
    place = draw(st.integers(0, max(0, len(content) - 1)))
    size = draw(st.sampled_from([1, 2, 7, 8, 40, 512, 4096]))
    noise = draw(st.sampled_from([b"\0", b"\xff\xfe", b"\n", b"}", b"[", b'"', b"1", b"\r\n\n"]))
    flipped = bytearray(content)
    for at in range(place, min(len(content), place + size)):
        flipped[at] ^= 1 << draw(st.integers(0, 7)) if size < 40 else 0xFF
    text = content.decode("utf-8", "replace")
    return draw(
        st.sampled_from(
            [
                (f"cut to {place} bytes", content[:place]),
                (f"{size} bytes missing at {place}", content[:place] + content[place + size :]),
                (f"{noise!r} at {place}", content[:place] + noise + content[place:]),
                (f"{noise!r} over {place}", content[:place] + noise + content[place + 1 :]),
                (f"bits of {size} bytes flipped at {place}", bytes(flipped)),
                (f"zeros from {place}", content[:place] + bytes(len(content) - place)),
                (f"{size} zeros at the end", content + bytes(size)),
                ("written twice", content + content),
                ("no newline at the end", content.rstrip(b"\n")),
                ("lines of Windows", content.replace(b"\n", b"\r\n")),
                ("with a byte order mark", b"\xef\xbb\xbf" + content),
                ("in UTF-16", text.encode("utf-16", "replace")),
                ("in UTF-32", text.encode("utf-32", "replace")),
            ]
        )
    )


# ---- JSON


@st.composite
def _changed_json(draw: st.DrawFn, content: bytes, name: str) -> tuple[str, bytes]:
    """Change values and keys of a JSON file, or of one of its lines."""
    lines = content.splitlines() if name.endswith("l") else [content]
    number = draw(st.integers(0, len(lines) - 1))
    document = {"": json.loads(lines[number])}
    raws: list[str] = []
    whats = [
        _edit(draw, document, raws)
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3, MAX_EDITS])))
    ]
    value = document[""]
    if isinstance(value, dict) and "digest" in value and draw(st.booleans()):
        value["digest"] = manifest_digest(value)  # an editor's work, not a disk's
    text = json.dumps(value).replace(f'"{TWICE}', '"')
    for place, raw in enumerate(raws):
        text = text.replace(f'"{NOISE.format(place)}"', raw)
    lines[number] = text.encode()
    return "; ".join(whats), b"\n".join(lines) + b"\n"


def _edit(draw: st.DrawFn, document: dict[str, Any], raws: list[str]) -> str:
    """Change one place of a document; return what was done."""
    places = list(_places(document[""], ("",)))
    *parents, key = draw(st.sampled_from(places))
    parent: Any = document
    for step in parents:
        parent = parent[step]
    where, old = ".".join(map(str, [*parents, key])), parent[key]
    how = draw(st.sampled_from(["value", "value", "tweak", "tweak", "raw", "remove", "add",
                                "rename", "twice", "copy", "nest"]))  # fmt: skip
    if how == "value":
        parent[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        return f"{where} = {parent[key]!r}"[:100]
    if how == "tweak":
        parent[key] = draw(st.sampled_from(_near(old)))
        return f"{where}: {old!r}"[:60] + f" -> {parent[key]!r}"[:60]
    if how == "raw":
        raw = draw(st.sampled_from(RAW))
        parent[key] = NOISE.format(len(raws))
        raws.append(raw)
        return f"{where} = {raw[:20]}"
    if how == "copy":
        parent[key] = copy.deepcopy(_value_at(document, draw(st.sampled_from(places))))
    elif how == "nest":
        for _ in range(draw(st.sampled_from(DEPTHS))):
            parent[key] = [parent[key]]
    elif how == "remove" and key != "":
        del parent[key]
    elif how == "rename" and isinstance(parent, dict) and key != "":
        others = [f"{key}x", key.upper(), key[1:], *parent, "\u001b[2J", "__class__", "x" * 5000]
        parent[draw(st.sampled_from(others))] = parent.pop(key)
    elif how == "twice" and isinstance(parent, dict) and key != "":
        parent[TWICE + key] = draw(st.sampled_from(VALUES))
    elif isinstance(old, dict):
        old[draw(st.sampled_from(["unknown", "\u001b[2J", "", "_comment"]))] = draw(
            st.sampled_from(VALUES)
        )
    elif isinstance(old, list):
        old.append(draw(st.sampled_from([*VALUES, *old])))
    return f"{how} at {where}"[:100]


def _near(value: Any) -> list[Any]:
    """Return values of the same kind, or of another kind with the same look."""
    if isinstance(value, bool) or value is None:
        return [not value, str(value), str(value).lower(), int(bool(value)), [value]]
    if isinstance(value, (int, float)):
        others = [value + 1, value - 1, -value, value * 2, value * 1000, value * 10**9, value / 3]
        return [*others, 0, str(value), [value], float(value)]
    if isinstance(value, str):
        return [f"{value}x", value[:-1], value.upper(), f" {value}", f"\u001b[31m{value}", [value]]
    if isinstance(value, list):
        numbered = {str(place): each for place, each in enumerate(value)}
        return [value[:-1], value + value, value[::-1], numbered]
    return [list(value), list(value.values()), {**value, "": value}]


def _places(value: Any, key: tuple[Any, ...]) -> Any:
    """Yield the keys that lead to each value inside a value."""
    yield key
    parts = value.items() if isinstance(value, dict) else ()
    parts = enumerate(value) if isinstance(value, list) else parts
    if len(key) < DEPTHS[0] * 10:
        for name, part in parts:
            yield from _places(part, (*key, name))


def _value_at(value: Any, place: Sequence[Any]) -> Any:
    for key in place:
        value = value[key]
    return value


# ---- Other objects in the place of a file


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


OBJECTS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": partial(Path.write_bytes, data=b""),
    "a directory": _replaced(Path.mkdir),
    "a dangling link": _replaced(lambda path: path.symlink_to("nothing-here")),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "a link to zeros without end": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link to a file elsewhere": _replaced(lambda path: path.symlink_to("/etc/hostname")),
    "a pipe": _replaced(os.mkfifo),
    "a thousand lines of noise": partial(Path.write_bytes, data=b"noise \xff\n" * 1000),
}
