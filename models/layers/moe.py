"""Mixture of experts: a router, gated MLPs of which each row uses `top_k`, and an optional shared expert for all rows.

On a GPU the experts' weights are stacked into one tensor and routing never synchronises with the host; elsewhere each expert
is a layer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...kernels.activation import activation
from ...kernels.activation.reference import is_in_torch
from ...kernels.dispatch import backend
from ...kernels.linear.eight_bit import Fp8Weight, Int8Weight
from ...kernels.moe import fused_experts, loop_experts, route
from ...kernels.moe.experts import RoutingConfig, StackedExperts, StackedWeight
from ..memory_formulas import FLOAT32, OpBytes
from ..text.spec import MoeSpec
from .basic import Converter, Norm, Renamed, TensorModule, WeightedLayer
from .builder import StoredTensor
from .linear import Linear, weights_deferred
from .mlp import GatedMlp, PlainMlp, gated_mlp_bytes
from .ranks import current_ranks

if TYPE_CHECKING:
    from .row_adapter import ExpertSlot

_NUMBERED_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Mixtral's names of an expert's layers."""


class RouterCorrection(StoredTensor):
    """Bias added to a router's scores when experts are chosen, but not to their weights: float32 `[experts]`."""

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield path.removesuffix("correction") + "gate.e_score_correction_bias", self.weight

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Yield the names of the bias in checkpoints, beside the router or in it; it may be a matrix of one row."""
        ((name, _),) = self.tensors(path)
        parent = path.removesuffix("correction")
        block = f"{parent.removesuffix('mlp.')}block_sparse_moe."  # MiniMax M2's name
        beside = (parent, block, f"{parent}gate.moe_statics.", f"{parent}moe_statics.")
        for stored in (name, *(f"{parent_name}e_score_correction_bias" for parent_name in beside)):
            yield stored, lambda tensor: [(name, tensor.flatten())]


class Mixture(WeightedLayer):
    """`[rows, dim] -> [rows, dim]`: the weighted sum of each row's experts, plus the shared expert.

    Checkpoints store one matrix per expert (`experts.3.gate_proj.weight`), or one tensor for all experts
    (`experts.gate_up_proj`), which is split while it is read. The router is never quantised, since it decides between
    nearly equal scores.

    Args:
        modality: index of the experts' width in `spec.inner`.
        shared: width of the shared expert, 0 for none; None: as the spec says.

    Attributes:
        slot: the adapters of requests that change experts; None if they do not.
        ranks: those that divide the experts; None: this process has all of them.
        absent_experts: the experts that other ranks hold, by number; here they have no memory.
        sent_bytes: see `ranks.rank_traffic`; the mean over the ranks, which depends on the choices of the rows.
    """

    slot: ExpertSlot | None = None

    def __init__(
        self, dim: int, spec: MoeSpec, dtype: torch.dtype, device: torch.device, *, modality: int = 0, shared: int | None = None
    ) -> None:
        super().__init__()
        self.rule = RoutingConfig(
            spec.top_k,
            spec.scoring,
            spec.normalise,
            spec.scale,
            spec.groups,
            spec.top_groups,
            spec.group_score,
            spec.jitter,
        )
        self.transposed, self.interleaved, self.scaled_inputs = spec.transposed, spec.interleaved, spec.scaled_inputs
        self.is_plain = bool(spec.plain)
        self.gate = Linear(dim, {"gate": spec.experts}, spec.router_bias, torch.float32, device, exact=True)
        self.correction = RouterCorrection((spec.experts,), torch.float32, device) if spec.correction else None
        self.expert_scale = StoredTensor((spec.experts,), torch.float32, device) if spec.expert_scale else None
        mlp, wide = partial(_build_expert, spec, dtype), spec.latent or dim
        fits = self.is_plain == is_in_torch(spec.act)  # the kernel has gates exactly with its own activations
        stack = fits and backend("moe", device, dtype) == "triton" and not weights_deferred()
        expert_device = torch.device("meta") if stack else device
        ranks, self.num_experts = current_ranks(), spec.experts
        self.ranks = ranks if ranks is not None and ranks.experts and spec.experts >= ranks.size else None
        held = range(spec.experts) if self.ranks is None else self.ranks.range_of(self.ranks.rank, spec.experts)
        self._experts = {number: mlp(wide, spec.inner[modality], device=expert_device) for number in held}
        self.experts = nn.ModuleDict({str(number): expert for number, expert in self._experts.items()})
        numbers = [number for number in range(spec.experts) if number not in held]
        self.absent_experts = {number: mlp(wide, spec.inner[modality], device=torch.device("meta")) for number in numbers}
        self.sent_bytes = 0 if self.ranks is None else -(-spec.top_k * wide * dtype.itemsize // self.ranks.size)
        self.stacked: StackedExperts | None = None
        if stack:
            gate_ups, downs = self._layers()
            self.stacked = StackedExperts(spec.act, _stack_weights(gate_ups, device), _stack_weights(downs, device))
        shared = spec.shared_inner if shared is None else shared
        self.shared_experts = _build_expert(spec.of_shared, dtype, dim, shared, device=device) if shared else None
        self.into = Linear(dim, {"fc1_latent_proj": wide}, bool(spec.shared_bias), dtype, device) if spec.latent else None
        self.out_of = Linear(wide, {"fc2_latent_proj": dim}, bool(spec.shared_bias), dtype, device) if spec.latent else None
        gated = shared and spec.shared_gate
        self.shared_gate = Linear(dim, {"shared_expert_gate": 1}, False, dtype, device, exact=True) if gated else None

    def forward(self, x: Tensor, modality_ids: Tensor | None = None) -> Tensor:
        out = self.routed(x)
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(x)
        return out.add_(shared if self.shared_gate is None else shared.mul_(activation("sigmoid", self.shared_gate(x))))

    def routed(
        self, x: Tensor, selected: Tensor | None = None, out: Tensor | None = None, scored: Tensor | None = None
    ) -> Tensor:
        """Run the routed experts. With stacked weights, only the rows in `selected` (bool) are written to `out`.

        `scored`: rows for the router; None: `x`.
        """
        if self.slot is not None and self.slot.step.groups:
            return self.slot.run(x, scored, lambda rows, scored_rows: self._routed(rows, None, None, scored_rows))
        return self._routed(x, selected, out, scored)

    def _routed(self, x: Tensor, selected: Tensor | None, out: Tensor | None, scored: Tensor | None) -> Tensor:
        """Compute the experts (see `routed`) with the adapters that their layers have now."""
        correction = None if self.correction is None else self.correction.weight
        weights, chosen = route(self.gate((x if scored is None else scored).float()), self.rule, correction)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale.weight[chosen.long()]
        if self.scaled_inputs:  # a row for each expert of a row
            x = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
            weights, chosen = torch.ones_like(weights).view(-1, 1), chosen.view(-1, 1)
        x = x if self.into is None else self.into(x)
        if self.stacked is None:
            others = None if self.ranks is None else (self.absent_experts, self._share_)
            mixed = loop_experts(x, weights, chosen, self.num_experts, lambda number, rows: self._experts[number](rows), others)
        else:
            if selected is not None:
                chosen = chosen.masked_fill_(~selected[:, None], -1)
            mixed = fused_experts(x, weights, chosen, self.stacked, out)
        if self.scaled_inputs and self.rule.top_k > 1:
            mixed = mixed.unflatten(0, (-1, self.rule.top_k)).sum(1)
        return mixed if self.out_of is None else self.out_of(mixed)

    @property
    def all_experts(self) -> Sequence[tuple[int, GatedMlp | PlainMlp]]:
        """The experts of all ranks by number."""
        return sorted((self._experts | self.absent_experts).items())

    @property
    def absent(self) -> Iterator[str]:
        """Paths, below this module, of the experts that other ranks hold."""
        return (f"experts.{number}" for number in self.absent_experts)

    def _share_(self, results: Tensor, counts: Sequence[int]) -> None:
        """Fill `results [pairs, dim]`, ordered by expert, with those of other ranks. `counts`: pairs of each expert."""
        assert self.ranks is not None
        starts = [0, *accumulate(counts)]
        firsts = (self.ranks.range_of(rank, self.num_experts).start for rank in range(self.ranks.size))
        self.ranks.share_rows_(results, [*(starts[first] for first in firsts), len(results)])

    def _layers(self) -> tuple[list[Linear], list[Linear]]:
        """Return the first layers of the experts here (gate and up, or up alone), and their down layers."""
        experts = self._experts.values()
        first = [expert.gate_up if isinstance(expert, GatedMlp) else expert.up for expert in experts]
        return first, [expert.down for expert in experts]

    def after_load(self) -> None:
        experts = self.stacked
        if experts is not None:
            gate_up, down = map(_stack_quantized, self._layers(), (experts.gate_up, experts.down))
            self.stacked = StackedExperts(experts.act, gate_up, down)

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Yield converters that split the tensors of all experts, `[experts, out, in]` or `[experts, in, out]`."""
        first = ("up_proj", ("up_proj",)) if self.is_plain else ("gate_up_proj", ("gate_proj", "up_proj"))
        for stored, names in (first, ("down_proj", ("down_proj",))):
            yield f"{path}.experts.{stored}", partial(self._split, path, names)
            yield f"{path}.experts.fc{3 - len(names)}.weight", partial(self._split, path, names)  # Aria's names
            yield f"{path}.experts.{stored}_bias", partial(self._split_bias, path, names)
        for name in () if self.is_plain else first[1]:  # Step3's names
            yield f"{path}.experts.{name}", partial(self._split, path, (name,))
        for part in ("weight", "bias"):
            yield f"{path}.router.{part}", Renamed(f"{path}.gate.{part}")
        yield f"{path}.gate.wg.weight", Renamed(f"{path}.gate.weight")  # Hunyuan's name
        for part, singular in product(_NUMBERED_PARTS.values(), ("shared_expert", "shared_mlp")):
            yield f"{path}.{singular}.{part}.weight", Renamed(f"{path}.shared_experts.{part}.weight")
        beside, shared = f"{path.removesuffix('mlp')}shared_mlp", f"{path}.shared_experts"
        for names in ((f"{beside}.input_linear", f"{beside}.output_linear"), (f"{path}.gate_up_proj", f"{path}.down_proj")):
            yield f"{names[0]}.weight", partial(_chunked, shared)
            yield f"{names[1]}.weight", Renamed(f"{shared}.down_proj.weight")
        block = f"{path.removesuffix('mlp')}block_sparse_moe"
        for router in ("gate", "router.layer"):  # "router.layer" and the next two names are Granite's
            yield f"{block}.{router}.weight", Renamed(f"{path}.gate.weight")
        yield f"{block}.input_linear.weight", partial(self._split, path, ("gate_proj", "up_proj"))
        yield f"{block}.output_linear.weight", partial(self._split, path, ("down_proj",))
        for i, (stored, part) in product(range(self.num_experts), _NUMBERED_PARTS.items()):
            yield f"{block}.experts.{i}.{stored}.weight", Renamed(f"{path}.experts.{i}.{part}.weight")

    def _split(self, path: str, names: tuple[str, ...], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        first, down = self._layers()
        out = down[0].outputs if names == ("down_proj",) else first[0].outputs * len(names) // (2 - self.is_plain)
        transposed = tensor.shape[-1] == out and (self.transposed or tensor.shape[-2] != out)
        for i, matrix in enumerate(tensor.mT if transposed else tensor):
            for name, part in zip(names, self._shards(matrix, len(names)), strict=True):
                yield f"{path}.experts.{i}.{name}.weight", part

    def _split_bias(self, path: str, names: tuple[str, ...], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for i, bias in enumerate(tensor):
            for name, part in zip(names, self._shards(bias, len(names)), strict=True):
                yield f"{path}.experts.{i}.{name}.bias", part

    def _shards(self, outputs: Tensor, count: int) -> Sequence[Tensor]:
        return [outputs[i::count] for i in range(count)] if self.interleaved else outputs.chunk(count)


def _build_expert(spec: MoeSpec, dtype: torch.dtype, dim: int, inner: int, *, device: torch.device) -> GatedMlp | PlainMlp:
    if spec.plain is not None:
        return PlainMlp(dim, inner, spec.bias, dtype, device, spec.act, spec.plain)
    return GatedMlp(dim, inner, spec.bias, dtype, device, act=spec.act)


class MixtureBeside(TensorModule):
    """A mixture beside an MLP (Gemma 4). Experts and router read the residual stream, each through a norm of its own."""

    def __init__(self, dim: int, spec: MoeSpec, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.mixture = Mixture(dim, spec, dtype, device)
        norm = partial(Norm, dim, eps, False, dtype, device)
        self.router_norm, self.before = norm(), norm()
        self.after_mlp, self.after = norm(), norm()

    def forward(self, x: Tensor, mlp: Tensor) -> Tensor:
        """Return the sum of both outputs. `x`: the residual stream. `mlp`: the MLP's output."""
        scored = self.router_norm(x).mul_(x.shape[1] ** -0.5)
        return self.after(self.mixture.routed(self.before(x), scored=scored)).add_(self.after_mlp(mlp))


class ModalityMixture(WeightedLayer):
    """Modality experts: rows of each modality have their own router and experts; the shared expert is for all rows.

    Attributes:
        slot: as in Mixture, for the experts of all modalities.
    """

    slot: ExpertSlot | None = None

    def __init__(self, dim: int, spec: MoeSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.names, self.each, self._mixtures = spec.modality_experts, spec.experts, list[Mixture]()
        for number, name in enumerate(spec.modality_experts):
            self._mixtures.append(Mixture(dim, spec, dtype, device, modality=number, shared=0))
            self.add_module(name, self._mixtures[number])
        # a row is sent for the experts of its modality only
        self.sent_bytes = self._mixtures[0].sent_bytes
        for mixture in self._mixtures:
            mixture.sent_bytes = 0
        shared = spec.shared_inner
        self.shared_experts = _build_expert(spec.of_shared, dtype, dim, shared, device=device) if shared else None

    def forward(self, x: Tensor, modality_ids: Tensor | None = None) -> Tensor:
        """Run each modality's rows. `modality_ids`: int64 `[rows]`; None: all rows use the first modality's experts."""
        if self.slot is not None and self.slot.step.groups:
            out = self.slot.run(x, modality_ids, self._routed)
        else:
            out = self._routed(x, modality_ids)
        return out if self.shared_experts is None else out.add_(self.shared_experts(x))

    def _routed(self, x: Tensor, modality_ids: Tensor | None) -> Tensor:
        """Run the routed experts, with the adapter that is set in their layers."""
        if modality_ids is None:
            return self._mixtures[0](x)
        out = torch.empty_like(x)
        for number, mixture in enumerate(self._mixtures):
            _mix_rows(mixture, x, modality_ids == number, out)
        return out

    @property
    def mixtures(self) -> Mapping[str, Mixture]:
        """The experts of each modality, by the name of their module."""
        return dict(zip(self.names, self._mixtures, strict=True))

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Yield names and converters. Checkpoints number experts across modalities and store routers as `[in, out]`."""
        for number, name in enumerate(self.names):
            mixture = f"{path}.{name}"
            yield f"{path}.gate.weight" + f"_{number}" * (number > 0), partial(_transposed, f"{mixture}.gate.weight")
            for i, part in product(range(self.each), ("gate_proj", "up_proj", "down_proj")):
                stored = f"{path}.experts.{number * self.each + i}.{part}.weight"
                yield stored, Renamed(f"{mixture}.experts.{i}.{part}.weight")
        names = [f"{path}.{name}.gate.e_score_correction_bias" for name in self.names]
        yield f"{path}.moe_statics.e_score_correction_bias", lambda tensor: zip(names, tensor, strict=True)


def _mix_rows(mixture: Mixture, x: Tensor, selected: Tensor, out: Tensor) -> None:
    """Run the rows in `selected` (bool `[rows]`) and write their results to `out`."""
    if mixture.stacked is not None:
        mixture.routed(x, selected, out)
    else:
        rows = selected.nonzero().flatten()
        out.index_copy_(0, rows, mixture(x.index_select(0, rows)))


def _stack_weights(layers: Sequence[Linear], device: torch.device) -> StackedWeight:
    """Replace the layers' weights and biases by views of one stacked tensor each."""
    count, first = len(layers), layers[0]
    whole = StackedWeight(
        torch.empty(count, *first.weight.shape, dtype=first.weight.dtype, device=device),
        None if first.bias is None else torch.empty(count, *first.bias.shape, dtype=first.bias.dtype, device=device),
    )
    for i, layer in enumerate(layers):
        layer.weight, layer.bias = whole.weight[i], None if whole.bias is None else whole.bias[i]
    return whole


def _stack_quantized(layers: Sequence[Linear], whole: StackedWeight) -> StackedWeight:
    """Stack the quantised weights of packed layers and give the layers views of the stack; `whole` if nothing is quantised."""
    parts = [layer.packed for layer in layers if isinstance(layer.packed, Int8Weight | Fp8Weight)]
    if not parts:
        return whole
    stacked = StackedWeight(
        torch.stack([part.weight for part in parts]), whole.bias, torch.stack([part.scale for part in parts])
    )
    for layer, weight, part in zip(layers, stacked.weight, parts, strict=True):
        layer.packed = replace(part, weight=weight)
    return stacked


def _chunked(path: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    return zip((f"{path}.gate_proj.weight", f"{path}.up_proj.weight"), tensor.chunk(2), strict=True)


def _transposed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor.T


def mixture_bytes(width: int, m: MoeSpec, ops: OpBytes) -> int:
    """Return the bytes per row alive in Mixture or ModalityMixture, without its input.

    The worst case: all rows have the same modality, and one expert in common.
    """
    s = ops.dtype.itemsize
    modality = (2 * width * s + 2 * 8 + 1) * (len(m.modality_experts) > 1)  # result, rows of a modality, mask and indices
    scores = width * ops.float32_copy + 4 * m.experts * FLOAT32  # logits, scores, candidates, scores by group
    routing = m.top_k * (FLOAT32 + 3 * 8)  # weights, experts, their order, and its inverse
    results = m.top_k * width * s
    expert = 8 + width * s + gated_mlp_bytes(width, max(m.inner), ops)
    total = width * (2 * FLOAT32 + s + ops.float32_copy)  # the weighted sum, and what is added to it
    shared = width * s + gated_mlp_bytes(width, m.shared_inner, ops)
    if m.latent:
        inside = mixture_bytes(m.latent, replace(m, latent=0, shared_inner=0), ops)
        return max(ops.linear_result(m.latent, ops.limits.rows) + inside + width * s, shared)
    if ops.fused("moe"):  # stacked experts compute all their rows at once
        inner = max(m.inner)
        pairs = m.top_k * (4 * FLOAT32 + (inner + width) * s)  # weights, experts, their order; results of both products
        pairs += m.scaled_inputs * m.top_k * (width * s + FLOAT32 + s) + (m.scaled_inputs and m.top_k > 1) * 2 * width * s
        quantised = (width + FLOAT32 + m.top_k * (inner + FLOAT32)) * ops.limits.int8
        return width * s + 1 + max(scores, pairs + quantised, shared)
    if m.scaled_inputs:
        total = m.top_k * (total + width * s) + width * s
    scaled = m.scaled_inputs * m.top_k * (width * s + FLOAT32)
    return max(modality + max(scores, routing + results + scaled + max(expert, total)), routing + shared)
