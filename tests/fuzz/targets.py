"""The targets of the fuzzer, one a kind of input: how it is mutated, and what reads it."""

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from data_prep.finished_shards import stats
from tests import ROOT
from tests.damaged_runs import command, make_run
from tests.fuzz import readers
from tests.fuzz.guard import call, guarded
from tests.fuzz.mutations import TEXTS, Damage, damages
from tests.launching import one_rank, write_json, write_shards
from zerolm.parts.settings import FLAGS
from zerolm.run_dir.files import MANIFEST

MODELS = ("tiny", "mixtral-tiny", "gpt2", "pythia-160m", "qwen3-0.6b", "olmoe-1b-7b", "llama-70b")
WORDS = [
    *(text for text in TEXTS if len(text) < 100), "0", "1", "2", "3e9", "1e999", "nan", "inf",
    "9" * 400, "1e30", "0x10", "\u0661\u0662", "\u00bd", "1_000", " 1 ", "\ud800", "1:2", "5:1",
    ":", "=", "=1", "a=b=c", "a=nan", "1h", "-1h", "1e400d", "9" * 400 + "d", "1.2.3s", "5GB",
    "1e400GiB", "100:shards=1", "9:x=1,y", "full", "false", "/dev/null", "nothing://x/y", "s3://", "file:///",
]  # fmt: skip
ODD_FLAGS = ("---check", "--no-data", "--no_", "--", "-", "-x", "word", "--=", "--dataa", "--Data")
PATHS = ("shards", "llama.json", "run", "run@10", "run/run.json", "profiles/zero3.json", "absent")
LOGS = ("metrics.jsonl", "events.jsonl", "samples.jsonl", "run.json", "rollbacks.json")
COMMANDS = {  # of logs
    "status": "run", "status --json": "run", "report": "run", "plot": "run",
    "sweep": "sweep/seed=0",
}  # fmt: skip
MAX_FILES = 3


class Input(NamedTuple):
    """What a target reads: damage to its files, and words of its command line."""

    damage: tuple[Damage, ...] = ()
    words: tuple[str, ...] = ()


class Target(NamedTuple):
    """A kind of input.

    Attributes:
        draw: draws an input; called with the directory of valid files.
        read: reads an input with all programs that do, and returns whether they accept it. Any
            error of it is a finding.
    """

    name: str
    draw: Callable[[st.DataObject, Path], Input]
    read: Callable[[Path, Input], bool]


def _drawn(files: Callable[[Path], Sequence[str]], words: Any = None) -> Any:
    """Return a `draw` of damage to some files."""

    def draw(data: st.DataObject, base: Path) -> Input:
        chosen = data.draw(words) if words is not None else ()
        names = files(base / COMMANDS[chosen[0]]) if words is not None else files(base)
        each = damages(base, names)
        several = st.lists(each, min_size=1, max_size=MAX_FILES, unique_by=lambda one: one.name)
        return Input(tuple(data.draw(several)), chosen)

    return draw


# ---- Flags and settings


@st.composite
def _flags(draw: st.DrawFn, base: Path) -> list[str]:
    """Draw some flags of pretrain.py, with values that are right, nearly right and absurd."""
    words: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(FLAGS)))
        about = FLAGS[name]
        values = [*about["choices"], *WORDS, *(str(base / each) for each in PATHS)]
        value = draw(st.one_of(st.sampled_from(values), st.text(max_size=8)))
        flag = draw(st.sampled_from([f"--{name}", f"--{name.replace('_', '-')}", f"--no_{name}"]))
        form = draw(st.sampled_from(["apart", "joined", "alone", "odd"]))
        if form == "odd":
            words += [draw(st.sampled_from(ODD_FLAGS)), value]
        else:
            words += {"apart": [flag, value], "joined": [f"{flag}={value}"], "alone": [flag]}[form]
    return words


def _draw_flags(data: st.DataObject, base: Path) -> Input:
    return Input(words=tuple(data.draw(_flags(base))))


def _read_flags(base: Path, given: Input) -> bool:
    return readers.accepted(base, (), [*_new_run(base), *given.words])


def _new_run(base: Path, **more: object) -> list[str]:
    """Return the arguments of a run that has not begun."""
    return [*command(base), "--check", "--run_dir", str(base / "new"), *_words(more)]


def _words(flags: dict[str, object]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _read_settings(base: Path, given: Input) -> bool:
    file = base / given.damage[0].name
    words = ["--settings", str(file), "--check", "--run_dir", str(base / "new")]
    return readers.accepted(base, given.damage, words)


def _read_profile(base: Path, given: Input) -> bool:
    file = base / given.damage[0].name
    return readers.accepted(base, given.damage, _new_run(base, deepspeed_config=file))


def _read_model(base: Path, given: Input) -> bool:
    file = base / given.damage[0].name
    return readers.accepted(base, given.damage, _new_run(base, model_config=file))


# ---- Shards, and runs


def _read_shards(base: Path, given: Input) -> bool:
    shards, names = base / "shards", [each.name for each in given.damage]
    complete = readers.answer(base, given.damage, "data", "verify", shards)
    changed = [name for name in names if not name.endswith(".json") and _differs(base, name)]
    assert not (complete and changed), f"verify calls shards complete that differ in {changed}"
    commands = (
        ("data", "stats", shards, "--workers", 1, "--json", base / "stats.json"),
        ("data", "inspect", shards, "--sequence", 3, "--seq_len", 16),
        ("data", "inspect", shards, "--document", 5, "--json"),
    )
    with pytest.MonkeyPatch.context() as patch:  # in this process
        patch.setattr(stats, "ordered_map", lambda make, items, _: map(make(), items))
        measured, *_ = [readers.answer(base, given.damage, *words) for words in commands]
    (base / "stats.json").unlink(missing_ok=True)
    return readers.accepted(base, given.damage, _new_run(base)) and complete and measured


def _differs(base: Path, name: str) -> bool:
    path, kept = base / name, base.with_name("kept") / name
    return not path.is_file() or path.read_bytes() != kept.read_bytes()


def _read_run(base: Path, given: Input) -> bool:
    good = readers.run_reading_commands(base, given.damage)
    if not readers.accepted(base, given.damage, command(base)):
        return False
    with contextlib.redirect_stdout(io.StringIO()):
        readers.resume(base)
    return good


def _read_logs(base: Path, given: Input) -> bool:
    run, kind = base / "run", given.words[0]
    page, picture = base / "page.html", base / "plot.png"
    words: dict[str, tuple[object, ...]] = {
        "status": ("status", run), "status --json": ("status", "--json", run),
        "report": ("report", run, "--output", page), "plot": ("plot", run, "--output", picture),
        "sweep": ("sweep", "--table", "--set", "seed=0,1", "--run_dir", base / "sweep"),
    }  # fmt: skip
    good = readers.answer(base, given.damage, *words[kind])
    if kind == "status --json" and good:
        readers.strict_lines(call(*words[kind])[1])
    if page.exists():
        assert "<script>alert" not in page.read_text(encoding="utf-8")
    return good


def _files_below(*folders: str, but: Sequence[str] = ()) -> Callable[[Path], list[str]]:
    def files(base: Path) -> list[str]:
        found = (path for folder in folders for path in (base / folder).rglob("*"))
        names = (str(path.relative_to(base)) for path in found if path.is_file())
        return sorted(name for name in names if not name.endswith(tuple(but)))

    return files


def _logs(run: Path) -> list[str]:
    prefix = Path(run.name) if run.parent.name != "sweep" else Path("sweep") / run.name
    return [str(prefix / name) for name in LOGS if (run / name).exists()]


TARGETS = {
    each.name: each
    for each in (
        Target("flags", _draw_flags, _read_flags),
        Target(
            "settings", _drawn(lambda base: ["settings.json", "run/run.json"]), _read_settings
        ),
        Target("DeepSpeed JSON", _drawn(_files_below("profiles")), _read_profile),
        Target("model config", _drawn(_files_below("models")), _read_model),
        Target("shards", _drawn(_files_below("shards")), _read_shards),
        Target("checkpoints and records", _drawn(_files_below("run")), _read_run),
        Target("metrics and events", _drawn(_logs, st.tuples(st.sampled_from(sorted(COMMANDS)))),
               _read_logs),
    )
}  # fmt: skip


# ---- The directory of valid files


class Bench:
    """A directory with valid files, of which each input gets a copy in the same place."""

    def __init__(self, directory: Path):
        self.base, self.kept = directory / "base", directory / "kept"
        self.base.mkdir(parents=True)
        with in_the_checkout(), contextlib.redirect_stdout(io.StringIO()):
            _make_files(self.base)
        self.base.rename(self.kept)

    def draw(self, target: Target, data: st.DataObject) -> Input:
        self.kept.rename(self.base)
        try:
            return target.draw(data, self.base)
        finally:
            self.base.rename(self.kept)

    def read(self, target: Target, given: Input) -> bool:
        """Let a target read an input; return whether it is accepted."""
        shutil.copytree(self.kept, self.base)
        try:
            for damage in given.damage:
                damage.apply(self.base / damage.name)
            with in_the_checkout(), guarded(self.base):
                return target.read(self.base, given)
        finally:
            shutil.rmtree(self.base)


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """Make a bench in a temporary directory, in a process group of this process alone."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name, one_rank(Path(name) / "store"):
        yield Bench(Path(name))


@contextlib.contextmanager
def in_the_checkout() -> Any:
    with pytest.MonkeyPatch.context() as patch:  # contextlib.chdir needs Python 3.11
        patch.chdir(ROOT)
        yield


def _make_files(base: Path) -> None:
    run = make_run(base)
    write_shards(base / "held-out", 40, seed=1)
    for folder, name in (("profiles", "ds_configs"), ("models", "model_configs")):
        (base / folder).mkdir()
        for path in (ROOT / name).glob("*.json"):
            if folder == "profiles" or path.stem in MODELS:
                shutil.copy(path, base / folder)
    shutil.copy(base / "llama.json", base / "models" / "a-tiny-llama.json")
    flags = dict(zip(*[iter(command(base))] * 2, strict=True))
    settings: dict[str, Any] = {name[2:]: value for name, value in flags.items()}
    settings |= {
        "data": [f"{settings['data']}=0.5"], "learning_rate": 1e-3, "schedule": "wsd", "seed": 3,
        "warmup_tokens": "5k", "decay_tokens": 5000, "checkpoint_interval": 10, "eval_interval": 5,
        "val_data": [str(base / "held-out")], "eval_tokens": 1024, "wandb": "off",
        "document_mask": True, "max_epochs": ["30"], "z_loss": 1e-4,
    }  # fmt: skip
    write_json(base / "settings.json", settings)
    for seed in (0, 1):
        shutil.copytree(run, base / "sweep" / f"seed={seed}", ignore=lambda *_: ["checkpoints"])
    assert (run / "checkpoints" / "step-00000015" / MANIFEST).exists()
