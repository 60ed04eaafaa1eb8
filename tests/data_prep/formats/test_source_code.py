"""Code trees: every text file is a document with its path, language and license."""

from identify.vendor.licenses import LICENSES

from data_prep.files.documents import InputRules
from data_prep.read.discovery import find_inputs
from data_prep.read.work_units import inputs_fingerprint
from tests.data_prep.read.small_inputs import read_all

TEXTS = dict(LICENSES)


def read(path):
    rules = InputRules(keep_records=True, code=True)
    inputs, notes = find_inputs([str(path)], "text", code=True)
    documents, tally = read_all(inputs, rules)
    records = {each.record["path"]: each.record for each in documents}
    return records, tally, notes, inputs_fingerprint(inputs, rules)


def test_language_and_license_come_from_the_path(tmp_path):
    files = {
        "LICENSE": TEXTS["MIT"],
        "README.md": "# A project\n",
        "src/main.rs": "fn main() {}\n",
        "src/Makefile": "all:\n",
        "src/data.json": "{}\n",
        "src/page.html": "<p>not extracted</p>\n",
        "src/own.c": "// SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note\nint a;\n",
        "vendor/lib/COPYING.txt": TEXTS["BSD-3-Clause"],
        "vendor/lib/deep/x.py": "x = 1\n",
        "both/LICENSE-MIT": TEXTS["MIT"],
        "both/LICENSE-APACHE": TEXTS["Apache-2.0"],
        "both/a.go": "package a\n",
        "odd/LICENSE": "All rights reserved. Ask first.",
        "odd/a.h": "int b;\n",
        "a.unknownkind": "?",
        ".git/config": "hidden",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "src/blob.py").write_bytes(b"x\0\1\2")
    records, tally, notes, key = read(tmp_path)
    shown = {name: (each["language"], each["license"]) for name, each in records.items()}
    assert shown["src/main.rs"] == ("rust", "MIT") and shown["README.md"] == ("markdown", "MIT")
    assert shown["src/Makefile"] == ("makefile", "MIT")
    assert shown["src/own.c"] == ("c", "GPL-2.0-only WITH Linux-syscall-note")
    assert shown["vendor/lib/deep/x.py"] == ("python", "BSD-3-Clause")
    assert shown["both/a.go"] == ("go", "Apache-2.0 OR MIT")
    assert shown["odd/a.h"] == ("c", "unknown")
    assert records["src/page.html"]["text"] == files["src/page.html"]
    unread = {"a.unknownkind", ".git/config", "both/LICENSE-MIT", "both/LICENSE-APACHE"}
    assert set(records) == set(files) - unread
    assert tally.skipped == {"binary": 1} and "a.unknownkind" in notes[0]
    (tmp_path / "LICENSE").write_text(TEXTS["ISC"])  # another time and size, but not of the code
    records, _, _, changed = read(tmp_path / "src")
    assert "license" not in records["main.rs"]  # nothing above the input is looked at
    assert read(tmp_path)[3] != key != changed
