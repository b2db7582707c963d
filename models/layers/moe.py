"""The one mixture of experts: a router, gated MLPs of which a row takes a few, and one for all rows. Knows no stack."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from ...kernels.moe import Routing, mix, route
from ..text.spec import MoeSpec
from .basic import Form, Weighted
from .linear import Linear
from .mlp import GatedMlp


class Correction(Weighted):
    """What is added to a router's scores when experts are chosen: float32 `[experts]`."""

    def __init__(self, experts: int, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.empty(experts, dtype=torch.float32, device=device)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield path.removesuffix("correction") + "gate.e_score_correction_bias", self.weight

    def forms(self, path: str) -> Iterator[tuple[str, Form]]:
        """It may lie beside the router, or as a table of one row."""
        ((name, _),) = self.tensors(path)
        above = path.removesuffix("correction")
        for stored in (name, f"{above}gate.moe_statics.e_score_correction_bias", f"{above}moe_statics.e_score_correction_bias"):
            yield stored, lambda tensor: [(name, tensor.flatten())]


class Mixture(Weighted):
    """`[rows, dim] -> [rows, dim]`: a row's experts weighted, and the shared one.

    Checkpoints keep each expert's matrices by themselves (`experts.3.gate_proj.weight`), or those of all in one tensor
    (`experts.gate_up_proj`), which is cut up as it is read. The router's products are never quantised: they decide between
    near equals.
    """

    def __init__(
        self, dim: int, spec: MoeSpec, dtype: torch.dtype, device: torch.device, *, kind: int = 0, shared: int | None = None
    ) -> None:
        super().__init__()
        self.rule = Routing(
            spec.top_k, spec.scoring, spec.normalise, spec.scale, spec.groups, spec.top_groups, spec.group_score
        )
        self.transposed = spec.transposed
        self.gate = Linear(dim, {"gate": spec.experts}, False, torch.float32, device, exact=True)
        self.correction = Correction(spec.experts, device) if spec.correction else None
        mlp = partial(GatedMlp, dim, bias=spec.bias, dtype=dtype, device=device, act=spec.act)
        self.experts = nn.ModuleList(mlp(inner=spec.inner[kind]) for _ in range(spec.experts))
        shared = spec.shared_inner if shared is None else shared
        self.shared_experts = mlp(inner=shared) if shared else None

    def forward(self, x: Tensor, kinds: Tensor | None = None) -> Tensor:
        correction = None if self.correction is None else self.correction.weight
        weights, chosen = route(self.gate(x.float()), self.rule, correction)
        out = mix(x, weights, chosen, len(self.experts), self._expert)
        return out if self.shared_experts is None else out.add_(self.shared_experts(x))

    def _expert(self, number: int, x: Tensor) -> Tensor:
        return self.experts[number](x)  # type: ignore[no-any-return]

    def forms(self, path: str) -> Iterator[tuple[str, Form]]:
        """Of the tensors that hold all experts, `[experts, out, in]` or `[experts, in, out]`."""
        yield f"{path}.experts.gate_up_proj", partial(self._cut, path, ("gate_proj", "up_proj"))
        yield f"{path}.experts.down_proj", partial(self._cut, path, ("down_proj",))

    def _cut(self, path: str, names: tuple[str, ...], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        expert = self.experts[0]
        assert isinstance(expert, GatedMlp)
        out = (expert.gate_up if len(names) == 2 else expert.down).outputs
        turned = tensor.shape[-1] == out and (self.transposed or tensor.shape[-2] != out)
        for i, own in enumerate(tensor.mT if turned else tensor):
            for name, part in zip(names, own.chunk(len(names)), strict=True):
                yield f"{path}.experts.{i}.{name}.weight", part


class MixtureByKind(Weighted):
    """Rows of each kind have a router and experts of their own; the shared one is for all."""

    def __init__(self, dim: int, spec: MoeSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.kinds, self.each = spec.kinds, spec.experts
        for kind, name in enumerate(spec.kinds):
            self.add_module(name, Mixture(dim, spec, dtype, device, kind=kind, shared=0))
        shared = spec.shared_inner
        self.shared_experts = GatedMlp(dim, shared, spec.bias, dtype, device, act=spec.act) if shared else None

    def forward(self, x: Tensor, kinds: Tensor | None = None) -> Tensor:
        """`kinds`: int64 `[rows]`; None: all are of the first."""
        if kinds is None:
            out: Tensor = self.get_submodule(self.kinds[0])(x)
        else:
            out = torch.empty_like(x)
            for kind, name in enumerate(self.kinds):
                rows = (kinds == kind).nonzero().flatten()
                out.index_copy_(0, rows, self.get_submodule(name)(x.index_select(0, rows)))
        return out if self.shared_experts is None else out.add_(self.shared_experts(x))

    def forms(self, path: str) -> Iterator[tuple[str, Form]]:
        """The kinds' experts as one list, one kind after another; their routers side by side, `[in, out]`."""
        for kind, name in enumerate(self.kinds):
            own = f"{path}.{name}"
            yield f"{path}.gate.weight" + f"_{kind}" * (kind > 0), partial(_transposed, f"{own}.gate.weight")
            for i, part in product(range(self.each), ("gate_proj", "up_proj", "down_proj")):
                stored = f"{path}.experts.{kind * self.each + i}.{part}.weight"
                yield stored, partial(_renamed, f"{own}.experts.{i}.{part}.weight")
        names = [f"{path}.{name}.gate.e_score_correction_bias" for name in self.kinds]
        yield f"{path}.moe_statics.e_score_correction_bias", lambda tensor: zip(names, tensor, strict=True)


def _renamed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor


def _transposed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor.T
