"""Only zerolm/engine and zerolm/ds_files know more of DeepSpeed than its documentation has.

mypy checks what is typed. This reads the source, where a value may be `Any`.
"""

import ast
import re
from inspect import get_annotations
from pathlib import Path

import pytest

from tests import ROOT, tracked
from zerolm.engine.protocol import Engine, Optimizer

ROOMS = {ROOT / "zerolm" / "engine", ROOT / "zerolm" / "ds_files"}
PUBLIC = {
    "deepspeed.DeepSpeedConfig",
    "deepspeed.accelerator.get_accelerator",
    "deepspeed.comm.log_summary",
    "deepspeed.init_distributed",
    "deepspeed.initialize",
    "deepspeed.runtime.lr_schedules",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF",
    "deepspeed.utils.logger",
    "deepspeed.utils.set_z3_leaf_module",
}
OTHERS = [
    path
    for path in tracked("pretrain.py", "zerolm/**/*.py", "launch/**/*.py", "data_prep/**/*.py")
    if not ROOMS & {*path.parents}
]


def members(kind: type) -> set[str]:
    """Return the names of a Protocol."""
    found = {name for each in kind.__mro__ for name in (*vars(each), *get_annotations(each))}
    return {name for name in found if not name.startswith("_")}


ALLOWED = {"engine": members(Engine), "optimizer": members(Optimizer)}


class Reader(ast.NodeVisitor):
    """Finds what a module reads of an engine, by names: `engine`, `self._engine`, `run.engine`."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: list[str] = []
        self.aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._alias(target, node.value)
        self.visit(tree)

    def _alias(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, own in zip(target.elts, value.elts, strict=False):
                self._alias(each, own)
        elif isinstance(target, ast.Name) and (kind := self.kind(value)):
            self.aliases[target.id] = kind

    def kind(self, node: ast.expr) -> str | None:
        """Return whether an expression is an engine, or the optimizer of one."""
        if isinstance(node, ast.Name):
            return "engine" if node.id == "engine" else self.aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            if node.attr in ("engine", "_engine"):
                return "engine"
            if node.attr == "optimizer" and self.kind(node.value) == "engine":
                return "optimizer"
        return None

    def _read(self, node: ast.AST, owner: ast.expr, name: str) -> None:
        kind = self.kind(owner)
        if kind and name not in ALLOWED[kind]:
            self.found.append(f"line {node.lineno}: {kind}.{name}")  # type: ignore[attr-defined]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._read(node, node.value, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr"):
            owner, name, *_ = node.args
            if isinstance(name, ast.Constant):
                self._read(node, owner, name.value)
            elif self.kind(owner):
                self.found.append(f"line {node.lineno}: a name that is computed")
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        if node.arg == "engine" and _has_no_type(node.annotation):
            self.found.append(f"line {node.lineno}: engine has no type")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if self.kind(node.target) and _has_no_type(node.annotation):
            self.found.append(f"line {node.lineno}: engine has no type")
        self.generic_visit(node)


def _has_no_type(annotation: ast.expr | None) -> bool:
    return annotation is None or (isinstance(annotation, ast.Name) and annotation.id == "Any")


def problems(source: str) -> list[str]:
    return Reader(ast.parse(source)).found


def private_names(source: str) -> set[str]:
    """Return what a module imports or reads of DeepSpeed and is not in `PUBLIC`."""
    used: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            used |= {each.name for each in node.names}
        elif isinstance(node, ast.Attribute):
            used.add(ast.unparse(node))
    return {
        name
        for name in used
        if re.fullmatch(r"deepspeed(\.\w+)*", name)
        and not any(f"{each}.".startswith(f"{name}.") for each in PUBLIC)
    }


def parameter_marks() -> set[str]:
    """Return the attributes that DeepSpeed gives to parameters."""
    import deepspeed

    directory = Path(deepspeed.__file__).parent / "runtime" / "zero"
    found = {"_hp_mapping", "tensor_model_parallel", "use_muon"}
    for path in directory.glob("*.py"):
        found |= set(re.findall(r"\bparam\.(ds_\w+)", path.read_text(encoding="utf-8")))
    return found


def test_other_code_reads_only_what_is_in_the_protocol() -> None:
    found = {path: problems(path.read_text(encoding="utf-8")) for path in OTHERS}
    assert len(found) > 300
    assert not {str(path): lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "def f(self): self._engine._config",
        "def f(run): run.engine.optimizer.averaged_gradients",
        "def f(engine: Engine):\n  optimizer = engine.optimizer\n  optimizer.bit16_groups",
        "def f(self):\n  optimizer, rank = self.engine.optimizer, 0\n  optimizer._flat",
        'def f(engine: Engine): getattr(engine.optimizer, "loss_scale", 1.0)',
        "def f(engine: Engine, name): setattr(engine, name, 1)",
        "def f(engine: Any): ...",
        "class Run:\n  engine: Any",
    ],
)
def test_a_read_of_the_inside_is_found(line) -> None:
    assert len(problems(line)) == 1


def test_what_the_protocol_names_may_be_read() -> None:
    assert not problems("def f(engine: Engine): engine.optimizer.param_groups[0]['lr']")


def test_other_code_neither_imports_the_inside_nor_reads_marks_of_parameters() -> None:
    marks, found = parameter_marks(), []
    assert marks > {"ds_id", "ds_numel", "ds_process_group", "ds_shape", "ds_status", "ds_tensor"}
    for path in OTHERS:
        name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        names = private_names(source) | (marks & names_read(source))
        found += [f"{name}: {each}" for each in sorted(names)]
    assert not found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from deepspeed.ops.adam import DeepSpeedCPUAdam", 1),
        ("import deepspeed\ndeepspeed.ops.__compatible_ops__", 2),
        ("from deepspeed.utils import logger, zero_to_fp32", 1),
        ("import deepspeed.comm\ndeepspeed.comm.log_summary()", 0),
        ("from deepspeed.runtime import lr_schedules", 0),
        ("import deepspeed_of_another", 0),
    ],
)
def test_an_import_of_the_inside_is_found(line, found) -> None:
    assert len(private_names(line)) == found


def names_read(source: str) -> set[str]:
    """Return all attributes, and strings that may be their names, as in `getattr`."""
    return {
        str(node.attr if isinstance(node, ast.Attribute) else node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute | ast.Constant)
    }


def test_the_protocol_is_that_of_the_engine_that_deepspeed_builds() -> None:
    """Every name is one of DeepSpeed's class, or of its instances."""
    from deepspeed.runtime import engine

    source = Path(engine.__file__).read_text(encoding="utf-8")
    inherited = {"train", "eval", "__call__"}  # of torch.nn.Module
    for name in ALLOWED["engine"] - inherited:
        known = hasattr(engine.DeepSpeedEngine, name) or f"self.{name}" in source
        assert known, f"DeepSpeed's engine has no {name}"
