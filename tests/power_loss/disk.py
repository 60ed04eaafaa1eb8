"""A disk that loses its power: what of recorded operations it may have kept.

The model is that of ALICE (Pillai et al., OSDI 2014) at its weakest, which no file system is below:

- A write reaches the disk when its file is synced. Before, any subset of the writes and truncations
  may have, in any order, and a write in part: in sectors, with zeros or the old content elsewhere.
- A name that is made, renamed or removed reaches the disk when its directory is synced. Before, any
  subset of such changes may have, in any order; a sync of the file itself does not help.
- A rename is atomic: the new name stands for the old file or the new one.
- What was synced stays.

SQLite's crash tests have the same rules for content; ext4, XFS and btrfs keep more of the order.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.power_loss.recording import Operation

SECTOR_BYTES = 512


@dataclass
class File:
    """A file: its content on the disk, and what was done to it since.

    Attributes:
        pending: (number of the operation, offset, data) of writes; None as data: a truncation.
    """

    durable: bytes = b""
    content: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, int, bytes | None]] = field(default_factory=list)


@dataclass
class Directory:
    """A directory: its names on the disk, its names now, and the changes since the last sync.

    Attributes:
        pending: (number of the operation, {name: what it stands for, None if removed}).
    """

    durable: dict[str, "Node"] = field(default_factory=dict)
    names: dict[str, "Node"] = field(default_factory=dict)
    pending: list[tuple[int, dict[str, "Node | None"]]] = field(default_factory=list)


@dataclass
class Link:
    """A symbolic link."""

    target: str


Node = File | Directory | Link
Tree = dict[str, bytes | str | None]  # {path: content; target of a link; None: a directory}
Kept = Callable[[int], bool]  # of the number of an operation that was not synced


class Disk:
    """A directory on a disk, to which operations are applied one after the other."""

    def __init__(self, operations: Sequence[Operation], root: Directory | None = None):
        self.operations = operations
        self.root = Directory() if root is None else root
        self.at = 0  # operations that were applied

    def advance(self) -> Operation:
        operation = self.operations[self.at]
        getattr(self, f"_{operation.kind}")(operation)
        self.at += 1
        return operation

    def pending(self) -> list[int]:
        """Return the numbers of the operations that a power loss may take back."""
        found: set[int] = set()
        for node in _reachable(self.root):
            if not isinstance(node, Link):
                found |= {entry[0] for entry in node.pending}
        return sorted(found)

    def tree(self) -> Tree:
        """Return what a program sees now."""
        return dict(_walk(self.root, lambda one: one.names, lambda one: bytes(one.content)))

    def after_loss(self, kept: Kept, rng: random.Random | None = None) -> Tree:
        """Return what is there after a power loss.

        Args:
            kept: which operations reached the disk although they were not synced.
            rng: writes may have reached it in part.
        """

        def names(directory: Directory) -> dict[str, Node]:
            found = dict(directory.durable)
            for number, change in directory.pending:
                if kept(number):
                    for name, node in change.items():
                        if node is None:
                            found.pop(name, None)
                        else:
                            found[name] = node
            return found

        return dict(_walk(self.root, names, lambda file: _content(file, kept, rng)))

    # ---- Operations

    def _parent(self, path: str) -> tuple[Directory, str]:
        *parents, name = path.split("/")
        node: Node = self.root
        for part in parents:
            assert isinstance(node, Directory)
            node = node.names[part]
        assert isinstance(node, Directory)
        return node, name

    def _node(self, path: str) -> Node:
        if path == ".":
            return self.root
        parent, name = self._parent(path)
        return parent.names[name]

    def _file(self, path: str) -> File:
        node = self._node(path)
        assert isinstance(node, File), path
        return node

    def _set(self, path: str, node: Node | None) -> None:
        parent, name = self._parent(path)
        parent.pending.append((self.at, {name: node}))
        if node is None:
            del parent.names[name]
        else:
            parent.names[name] = node

    def _c(self, operation: Operation) -> None:
        self._set(operation.path, File())

    def _m(self, operation: Operation) -> None:
        self._set(operation.path, Directory())

    def _y(self, operation: Operation) -> None:
        self._set(operation.path, Link(operation.other))

    def _l(self, operation: Operation) -> None:
        self._set(operation.other, self._node(operation.path))

    def _u(self, operation: Operation) -> None:
        self._set(operation.path, None)

    def _r(self, operation: Operation) -> None:
        source, old = self._parent(operation.path)
        target, new = self._parent(operation.other)
        node = source.names.pop(old)
        target.names[new] = node
        if source is target:
            source.pending.append((self.at, {old: None, new: node}))
        else:
            target.pending.append((self.at, {new: node}))
            source.pending.append((self.at, {old: None}))

    def _w(self, operation: Operation) -> None:
        file = self._file(operation.path)
        _put(file.content, operation.offset, operation.data)
        file.pending.append((self.at, operation.offset, operation.data))

    def _t(self, operation: Operation) -> None:
        file = self._file(operation.path)
        _resize(file.content, operation.offset)
        file.pending.append((self.at, operation.offset, None))

    def _s(self, operation: Operation) -> None:
        node = self._node(operation.path)
        if isinstance(node, File):
            node.durable = bytes(node.content)
            node.pending = []
        elif isinstance(node, Directory):
            node.durable = dict(node.names)
            node.pending = []


def read_directory(path: Path) -> Directory:
    """Return a directory as it is, with all of it on the disk."""
    found = Directory()
    for each in sorted(path.iterdir()):
        node: Node
        if each.is_symlink():
            node = Link(str(each.readlink()))
        elif each.is_dir():
            node = read_directory(each)
        else:
            content = each.read_bytes()
            node = File(content, bytearray(content))
        found.durable[each.name] = found.names[each.name] = node
    return found


def write_tree(tree: Tree, directory: Path) -> None:
    """Write what a power loss has left to a real directory."""
    directory.mkdir(parents=True)
    for name, content in tree.items():
        path = directory / name
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def tree_of(directory: Path) -> Tree:
    """Return a real directory as a tree."""
    root = read_directory(directory)
    return dict(_walk(root, lambda one: one.names, lambda one: bytes(one.content)))


def _content(file: File, kept: Kept, rng: random.Random | None) -> bytes:
    content = bytearray(file.durable)
    for number, offset, data in file.pending:
        if not kept(number):
            continue
        if data is None:
            _resize(content, offset)
        elif rng is None or rng.random() < 0.5:
            _put(content, offset, data)
        else:
            _put_in_part(content, offset, data, rng)
    return bytes(content)


def _put_in_part(content: bytearray, offset: int, data: bytes, rng: random.Random) -> None:
    """Write some of the sectors; the size may have grown without the others."""
    end = offset + len(data)
    if rng.random() < 0.5 and end > len(content):
        _resize(content, end)
    sectors = range(offset - offset % SECTOR_BYTES, end, SECTOR_BYTES)
    chosen = [start for start in sectors if rng.random() < 0.5]
    if rng.random() < 0.3 and chosen:  # the first ones only, as when a file grows
        chosen = list(sectors[: len(chosen)])
    for start in chosen:
        first, last = max(start, offset), min(start + SECTOR_BYTES, end)
        _put(content, first, data[first - offset : last - offset])


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if offset > len(content):
        _resize(content, offset)
    content[offset : offset + len(data)] = data


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _walk(
    directory: Directory,
    names: Callable[[Directory], dict[str, Node]],
    content: Callable[[File], bytes],
    prefix: str = "",
) -> Iterator[tuple[str, bytes | str | None]]:
    for name, node in sorted(names(directory).items()):
        path = prefix + name
        if isinstance(node, File):
            yield path, content(node)
        elif isinstance(node, Link):
            yield path, node.target
        else:
            yield path, None
            yield from _walk(node, names, content, f"{path}/")


def _reachable(directory: Directory) -> Iterator[Node]:
    """Yield all that a name on the disk, now, or of an unsynced change stands for."""
    stack: list[Node] = [directory]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, Directory):
            stack += [*node.durable.values(), *node.names.values()]
            stack += [each for _, change in node.pending for each in change.values() if each]
