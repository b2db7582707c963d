"""The decoder of Gemma 3n: alternating updates of several residual streams, and a low-rank branch beside attention.

Sources: arXiv 2301.13310 (alternating updates), 2411.07501 (the low-rank branch).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.metadata import AttentionMetadata
from ..interface import ForwardBatch
from ..layers.basic import Norm, TensorModule
from ..layers.builder import Builder, StoredTensor
from ..layers.linear import Linear
from .decoder import Decoder, DecoderLayer
from .rope import CosSin
from .spec import AltUpSpec, DecoderSpec, LayerSpec

_MIN_SQUARE = 1e-5


class AltUp(TensorModule):
    """Predicts all streams `[rows, streams, hidden]` from the active one, and corrects them by the layer's output."""

    def __init__(self, spec: AltUpSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        n, hidden = spec.streams, stack.hidden_size
        self.spec, self.input_scale = spec, hidden**-1.0
        self.router_norm = Norm(hidden, stack.eps, False, dtype, device)
        self.modality_router = Linear(hidden, {"modality_router": n}, False, dtype, device, exact=True)
        self.prediction_coefs = Linear(n, {"prediction_coefs": n**2}, False, dtype, device, exact=True)
        self.correction_coefs = Linear(n, {"correction_coefs": n}, False, dtype, device, exact=True)
        self.correct_output_scale = StoredTensor((hidden,), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """Return the predicted streams."""
        n = self.spec.streams
        coefs = self.prediction_coefs(self._route(x[:, self.spec.active].contiguous())).view(-1, n, n)
        return torch.baddbmm(x, coefs, x)

    def correct_(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Correct the predicted streams in place by the active one's new value `[rows, hidden]`; return its scaled result."""
        coefs = self.correction_coefs(self._route(computed)).add_(1.0)
        innovation = computed.sub_(predicted[:, self.spec.active])
        predicted.addcmul_(innovation[:, None], coefs[..., None])
        active = predicted[:, self.spec.active].clone()
        return active.mul_(self.correct_output_scale.weight) if self.spec.scaled else active

    def _route(self, active: Tensor) -> Tensor:
        routed = self.modality_router(self.router_norm(active).mul_(self.input_scale))
        return routed.float().tanh_().to(active.dtype)


class AltUpLayer(DecoderLayer):
    """A layer that computes one of several residual streams."""

    def __init__(self, spec: LayerSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, stack, dtype, device)
        assert stack.altup is not None
        rank, build = stack.altup.laurel_rank, Builder(self, dtype, device).scope("laurel")
        self.altup, self.active = AltUp(stack.altup, stack, dtype, device), stack.altup.active
        self.laurel_in = (build.linear(["linear_left"], stack.hidden_size, [rank], False),)
        self.laurel_out = (
            build.linear(["linear_right"], rank, [stack.hidden_size], False),
            build.norm("post_laurel_norm", stack.hidden_size, stack.eps, False),
        )

    def forward(  # type: ignore[override]
        self, streams: Tensor, cos_sin: CosSin | None, cache: Tensor, attn: AttentionMetadata, per_layer: Tensor
    ) -> Tensor:
        """Return the streams `[rows, streams, hidden]` after this layer."""
        predicted = self.altup(streams)
        x = predicted[:, self.active].clone()
        normed = self.before_attention(x)
        laurel = self._laurel(normed)
        attended = self.after_attention(self.mixers[0](normed, cos_sin, cache, attn))
        x.add_(attended).add_(laurel).mul_(0.5**0.5)
        del normed, laurel, attended
        x.add_(self.after_mlp(self.mlps[0](self.before_mlp(x))))
        active = self.altup.correct_(predicted, x)
        predicted[:, 1:] += self.project_per_layer(active, per_layer)[:, None]
        return predicted

    def _laurel(self, normed: Tensor) -> Tensor:
        (left,), (right, norm) = self.laurel_in, self.laurel_out
        return norm(right(left(normed))).add_(normed)


class AltUpDecoder(Decoder):
    """ForwardBatch -> normed hidden states `[rows, hidden]`. Further streams begin as projections of the embeddings."""

    layer_class = AltUpLayer

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        assert spec.altup is not None
        build, hidden, further = Builder(self, dtype, device), spec.hidden_size, range(spec.altup.streams - 1)
        names = [f"altup_projections.{i}" for i in further]
        self.further_in = (build.linear(names, hidden, [hidden] * len(names), False),)
        self.further_out = [build.linear([f"altup_unembed_projections.{i}"], hidden, [hidden], False) for i in further]

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed(batch)
        self.put_encoder_rows(x, batch)
        cos_sin = [*(rotary(batch.positions) for rotary in self.rotaries), None]
        per_layer = self._per_layer_inputs(x, batch)
        x = self._split(x)
        steps = zip(self.layers, self.rope_of_layer, self.cache_of_layer, per_layer, strict=True)
        for layer, rope, cache, second in steps:
            x = layer(x, cos_sin[rope], batch.kv_caches[cache], batch.attn[cache], second)
        return self.norm(self._join(x))

    def _split(self, x: Tensor) -> Tensor:
        """Return `x` and its projections, of equal root mean square: `[rows, streams, hidden]`."""
        further = self.further_in[0](x).view(len(x), -1, x.shape[1])
        return torch.cat((x[:, None], further.mul_(_magnitude(x)[:, None] / _magnitude(further, _MIN_SQUARE))), 1)

    def _join(self, streams: Tensor) -> Tensor:
        """Return the mean of all streams, the further ones projected to the root mean square of the first."""
        total = streams[:, 0].contiguous()
        magnitude = _magnitude(total)
        for i, projection in enumerate(self.further_out, start=1):
            stream = projection(streams[:, i].contiguous())
            total = total.add(stream.mul_(magnitude / _magnitude(stream, _MIN_SQUARE)))
        return total.div_(streams.shape[1])


def _magnitude(x: Tensor, least: float = 0.0) -> Tensor:
    """Return the root mean square of each row, `[..., 1]`; `least`: lower limit of the mean square."""
    return x.square().mean(-1, keepdim=True).clamp_(min=least).sqrt_()
