"""The one mixture of experts: a router, gated MLPs of which a row takes a few, and one for all rows. Knows no stack.

On a GPU the experts' weights lie side by side and no choice is read on the host; elsewhere each expert is a layer by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from ...kernels.dispatch import backend
from ...kernels.fp8 import Fp8
from ...kernels.int8 import Int8
from ...kernels.moe import Experts, Routing, Stacked, mix, mix_experts, route
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
        mlp = partial(GatedMlp, dim, bias=spec.bias, dtype=dtype, act=spec.act)
        together = backend("moe", device, dtype) == "triton"
        own = torch.device("meta") if together else device
        self.experts = nn.ModuleList(mlp(inner=spec.inner[kind], device=own) for _ in range(spec.experts))
        self.side_by_side: Experts | None = None
        if together:
            gate_ups, downs = self._layers()
            self.side_by_side = Experts(spec.act, _side_by_side(gate_ups, device), _side_by_side(downs, device))
        shared = spec.shared_inner if shared is None else shared
        self.shared_experts = mlp(inner=shared, device=device) if shared else None

    def forward(self, x: Tensor, kinds: Tensor | None = None) -> Tensor:
        out = self.mixed(x)
        return out if self.shared_experts is None else out.add_(self.shared_experts(x))

    def mixed(self, x: Tensor, mine: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Without the shared expert. Side by side: only the rows that are `mine` (bool `[rows]`), written to `out`."""
        correction = None if self.correction is None else self.correction.weight
        weights, chosen = route(self.gate(x.float()), self.rule, correction)
        if self.side_by_side is None:
            return mix(x, weights, chosen, len(self.experts), self._expert)
        if mine is not None:
            chosen = chosen.masked_fill_(~mine[:, None], -1)
        return mix_experts(x, weights, chosen, self.side_by_side, out)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        return self.experts[number](x)  # type: ignore[no-any-return]

    def _layers(self) -> tuple[list[Linear], list[Linear]]:
        """Gate and up of all experts, and down."""
        experts = [expert for expert in self.experts if isinstance(expert, GatedMlp)]
        return [expert.gate_up for expert in experts], [expert.down for expert in experts]

    def filled(self) -> None:
        experts = self.side_by_side
        if experts is not None:
            gate_up, down = map(_in_8_bits, self._layers(), (experts.gate_up, experts.down))
            self.side_by_side = Experts(experts.act, gate_up, down)

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
                self._mix_kind(self.get_submodule(name), x, kinds == kind, out)
        return out if self.shared_experts is None else out.add_(self.shared_experts(x))

    @staticmethod
    def _mix_kind(experts: nn.Module, x: Tensor, mine: Tensor, out: Tensor) -> None:
        assert isinstance(experts, Mixture)
        if experts.side_by_side is not None:
            experts.mixed(x, mine, out)
        else:
            rows = mine.nonzero().flatten()
            out.index_copy_(0, rows, experts(x.index_select(0, rows)))

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


def _side_by_side(layers: Sequence[Linear], device: torch.device) -> Stacked:
    """Makes the layers' weights parts of one tensor, and their biases."""
    outer, inner = len(layers), layers[0]
    assert inner.weight is not None
    whole = Stacked(
        torch.empty(outer, *inner.weight.shape, dtype=inner.weight.dtype, device=device),
        None if inner.bias is None else torch.empty(outer, *inner.bias.shape, dtype=inner.bias.dtype, device=device),
    )
    for i, layer in enumerate(layers):
        layer.weight, layer.bias = whole.weight[i], None if whole.bias is None else whole.bias[i]
    return whole


def _in_8_bits(layers: Sequence[Linear], whole: Stacked) -> Stacked:
    """Of layers that were quantised as they were packed, which then hold parts of it."""
    parts = [layer.packed for layer in layers if isinstance(layer.packed, Int8 | Fp8)]
    if not parts:
        return whole
    made = Stacked(torch.stack([part.weight for part in parts]), whole.bias, torch.stack([part.scale for part in parts]))
    for layer, weight, part in zip(layers, made.weight, parts, strict=True):
        layer.packed = replace(part, weight=weight)
    return made


def _renamed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor


def _transposed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor.T
