"""Measures the peak bytes of live tensors while code runs, by intercepting every operator."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Measures the peak bytes of live tensors while it is active. Tensors that existed before do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._live = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and ((key := _memory(leaf)) in self._users or key not in inputs):
                self._hold(leaf, key)
        return result

    def _hold(self, tensor: Tensor, key: int) -> None:
        size = tensor.untyped_storage().nbytes()
        self._users[key] = self._users.get(key, 0) + 1
        if self._users[key] == 1:
            self._live += size
            self.most = max(self.most, self._live)
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._live -= size


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
