"""`LiveBytes`: the peak of the bytes that torch holds."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages that operators have created."""

    def __init__(self, known):
        super().__init__()
        self.known = {one.untyped_storage()._cdata for one in known}
        self.sizes = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                key = storage._cdata
                if key not in self.sizes and key not in self.known:
                    self.sizes[key] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, key, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result
