"""EAGLE-3 heads: a decoder layer or a few that draft tokens from hidden states of three layers of a model.

Source: arXiv 2503.01840, and the published layout: `fc`, `midlayer`, `norm`, `lm_head`, and `d2t`, which is added to a token of
the head's smaller vocabulary to get the model's. Further layers are named `layers.1` and so on, and get only the result of the
layer before them. A head that drafts several tokens at once (see `models.parallel_drafting`) also has `mask_hidden`, which
stands for the model's hidden states of the tokens to be drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...callers.errors import CheckpointError, ConfigError
from ...checkpoints.config import positive_int
from ..interface import CacheSpec, ForwardBatch, StepLimits
from ..layers.basic import EmbeddingTable, TensorModule
from ..layers.builder import StoredTensor
from ..layers.linear import Linear
from ..memory_formulas import OpBytes
from ..parallel_drafting import mask_token
from ..weights import check, fill
from .attention import DecoderAttention
from .decoder import build_mlp, build_norm, decoder_bytes
from .decoder_config import decoder_spec
from .rope import CosSin, Rotary
from .spec import AttentionSpec, DecoderSpec, MlpSpec
from .stacks import stack_of

_PREFIXES = (("model.layers.0.", "midlayer."), ("layers.0.", "midlayer."), ("model.", ""))
_UNUSED = ("t2d", "rotary_emb.")
_IDS, _NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"


@dataclass(frozen=True)
class Eagle3Spec:
    """An EAGLE-3 head.

    Args:
        stack: its decoder layers, with the vocabulary of the model. draft_vocab: tokens that it can draft.
        layers: number of the model's layers before each of the hidden states that it reads.
        norms_residual: the residual stream begins with the normed hidden state instead of the hidden state itself.
        mask_token: the token that stands for each token to be drafted after the first; None if they are drafted one by one.
    """

    stack: DecoderSpec
    draft_vocab: int
    layers: tuple[int, ...]
    norms_residual: bool = False
    mask_token: int | None = None


def is_eagle3(architecture: object) -> bool:
    """Return whether an architecture of config.json is a head of this layout; the names differ by who published it."""
    return isinstance(architecture, str) and "eagle3" in architecture.lower()


def eagle3_spec(config: Mapping[str, Any], num_layers: int, parallel: bool = False) -> Eagle3Spec:
    """Read the config.json of a head for a model with `num_layers` layers. `parallel`: it drafts from mask tokens.

    The default layers are those of the paper's code. vLLM's key counts the layers before a state, and SGLang's, inside
    `eagle_config`, names the layer whose output it is.

    Raises:
        ConfigError: a key is missing or unreadable, or the head is none for this model.
    """
    stack = decoder_spec(config, stack_of(config))
    if not all(isinstance(layer.mixer, AttentionSpec) and isinstance(layer.mlp, MlpSpec) for layer in stack.layers):
        raise ConfigError(
            "each layer of an EAGLE-3 head must be plain attention and an MLP, and this head has layers of another kind"
        )
    nested, ids = config.get(_NESTED), config.get(_IDS)
    if not ids and isinstance(nested, Mapping) and nested.get(_IDS):
        ids = [one + 1 if isinstance(one, int) else one for one in nested[_IDS]]
    layers = (2, num_layers // 2, num_layers - 3) if not ids else tuple(ids)
    if not all(isinstance(one, int) and 1 <= one <= num_layers for one in layers):
        reason = f"reads hidden states after {', '.join(map(str, layers))} layers, and the model has {num_layers}"
        raise ConfigError(f"the EAGLE-3 head {reason}; give a head that was made for this model")
    draft_vocab = positive_int({"draft_vocab_size": stack.vocab_size, **config}, "draft_vocab_size")
    mask = mask_token(config, stack.vocab_size) if parallel or config.get("parallel_drafting") else None
    return Eagle3Spec(stack, draft_vocab, layers, bool(config.get("norm_before_residual")), mask)


class Eagle3Attention(DecoderAttention):
    """Attention whose input is a token's embedding beside a hidden state."""

    def __init__(self, spec: AttentionSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, replace(stack, hidden_size=2 * stack.hidden_size), dtype, device)
        self.out = Linear(spec.heads * spec.head_dim, {"o_proj": stack.hidden_size}, spec.out_bias, dtype, device)


class Eagle3Layer(TensorModule):
    """The first layer of a head; the names of its parts are those of the layout."""

    def __init__(self, spec: Eagle3Spec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        stack, layer = spec.stack, spec.stack.layers[0]
        assert isinstance(layer.mixer, AttentionSpec)
        assert layer.mlp is not None
        self.norms_residual = spec.norms_residual
        self.input_layernorm = build_norm(stack, dtype, device)
        self.hidden_norm = build_norm(stack, dtype, device)
        self.self_attn = Eagle3Attention(layer.mixer, stack, dtype, device)
        self.post_attention_layernorm = build_norm(stack, dtype, device)
        self.mlp = build_mlp(layer.mlp, stack, dtype, device)

    def forward(self, embedded: Tensor, hidden: Tensor, cos_sin: CosSin | None, batch: ForwardBatch) -> Tensor:
        """Return the residual stream `[rows, hidden]` after the layer."""
        normed = self.hidden_norm(hidden)
        rows = torch.cat((self.input_layernorm(embedded), normed), 1)
        attended = self.self_attn(rows, cos_sin, batch.kv_caches[0], batch.attn[0])
        stream = normed.clone() if self.norms_residual else hidden.clone()
        added = self.mlp(self.post_attention_layernorm(stream, attended), None)
        return stream.add_(added)


class Eagle3LaterLayer(TensorModule):
    """A layer after the first. `number`: its index in the head."""

    def __init__(self, number: int, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        layer, self.number = stack.layers[number], number
        assert isinstance(layer.mixer, AttentionSpec)
        assert layer.mlp is not None
        self.input_layernorm = build_norm(stack, dtype, device)
        self.self_attn = DecoderAttention(layer.mixer, stack, dtype, device)
        self.post_attention_layernorm = build_norm(stack, dtype, device)
        self.mlp = build_mlp(layer.mlp, stack, dtype, device)

    def forward(self, stream: Tensor, cos_sin: CosSin | None, batch: ForwardBatch) -> Tensor:
        """Return the residual stream `[rows, hidden]` after the layer. It is changed in place."""
        attended = self.self_attn(self.input_layernorm(stream), cos_sin, batch.kv_caches[self.number], batch.attn[0])
        return stream.add_(self.mlp(self.post_attention_layernorm(stream, attended), None))


class Eagle3Head(nn.Module):
    """Drafts tokens of a model.

    Args:
        target: width of the model's hidden states. embedding: the model's table of tokens, for a head that stores none.
    """

    adapters: Sequence[str] = ()

    def __init__(
        self, spec: Eagle3Spec, target: int, embedding: EmbeddingTable | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec, hidden, stack = spec, spec.stack.hidden_size, spec.stack
        self.shared = [embedding]  # in a list: not a part of the head
        if embedding is None:
            self.embed_tokens = EmbeddingTable(stack.vocab_size, hidden, dtype, device)
        self.fc = Linear(len(spec.layers) * target, {"fc": hidden}, False, dtype, device)
        self.midlayer = Eagle3Layer(spec, dtype, device)
        self.layers = nn.ModuleDict(
            {str(number): Eagle3LaterLayer(number, stack, dtype, device) for number in range(1, len(stack.layers))}
        )
        self.norm = build_norm(stack, dtype, device)
        self.lm_head = Linear(hidden, {"lm_head": spec.draft_vocab}, False, dtype, device, exact=True)
        mixer = stack.layers[0].mixer
        self.rope = mixer.rope if isinstance(mixer, AttentionSpec) else None
        self.rotary = None if self.rope is None else Rotary(self.rope, device)
        layers = (self.midlayer, *self.layers.values())
        self.cache_specs: Sequence[CacheSpec] = [cast(Eagle3LaterLayer, layer).self_attn.cache_spec for layer in layers]
        if spec.mask_token is not None:
            self.mask_hidden = StoredTensor((len(spec.layers) * target,), dtype, device)
        self.target_ids = torch.arange(spec.draft_vocab, device=device)  # the model's token of each of the head's

    def combine(self, states: Tensor) -> Tensor:
        """Return `[rows, hidden]` of the hidden states `[rows, layers * target]` of the model's layers, side by side."""
        return self.fc(states)

    def mask_states(self, count: int) -> Tensor:
        """Return the states `[count, hidden]` of `count` mask tokens. The head must have a mask token."""
        return self.combine(self.mask_hidden.weight[None]).expand(count, -1)

    def draft(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """Return the residual stream `[rows, hidden]` for tokens and the states from which they were predicted.

        Args:
            batch: as in `DecoderModel.draft`.
            hidden: of `combine`, or of an earlier `draft`. It is not changed.
        """
        cos_sin = None
        if self.rope is not None and self.rotary is not None:
            axes = batch.positions[: self.rope.num_axes]
            cos_sin = self.rotary(axes.expand(self.rope.num_axes, -1) if len(axes) < self.rope.num_axes else axes)
        (table,) = self.shared
        embedded = (self.embed_tokens if table is None else table)(batch.input_ids)
        stream = self.midlayer(embedded, hidden, cos_sin, batch)
        for layer in self.layers.values():
            stream = layer(stream, cos_sin, batch)
        return stream

    def next_token(self, state: Tensor) -> int:
        """Return the likeliest of the model's tokens after a row `[1, hidden]` of `draft`."""
        logits = self.lm_head(self.norm(state))[0].float()
        return int(self.target_ids[int(logits.argmax())])

    def forward_bytes(self, limits: StepLimits) -> int:
        """Return the bytes of the largest step."""
        stack, ops = self.spec.stack, OpBytes(self.fc.dtype, limits)
        wide = 3 * 2 * stack.hidden_size * self.fc.dtype.itemsize + ops.linear(
            self.fc.weight.shape[1], stack.hidden_size, limits.rows
        )
        return decoder_bytes(stack, limits, self.fc.dtype) + limits.rows * wide

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the head with the stored tensors.

        Raises:
            CheckpointError: missing, surplus or misshapen tensors, or tokens that the model does not have.
        """
        fill(self, self._take_ids(weights), _PREFIXES, self._unused)

    def check(self, headers: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError as `load` does, from the headers of the files."""
        self._check_ids("d2t" in headers)
        tensors = ((name, _flat(name, tensor)) for name, tensor in headers.items() if name != "d2t")
        check(self, tensors, _PREFIXES, self._unused)

    @property
    def _unused(self) -> tuple[str, ...]:
        unused = [*_UNUSED, *(f"layers.{number}.hidden_norm." for number in self.layers)]  # only the first layer uses its own
        unused += [] if self.spec.mask_token is not None else ["mask_hidden"]
        return tuple(unused if self.shared[0] is None else [*unused, "embed_tokens."])

    def _check_ids(self, stored: bool) -> None:
        if not stored and self.spec.draft_vocab != self.spec.stack.vocab_size:
            sizes = f"draft_vocab_size is {self.spec.draft_vocab}, and vocab_size {self.spec.stack.vocab_size}"
            raise CheckpointError(
                f"the EAGLE-3 head has no d2t, which names the model's token of each of its own: {sizes}; give a head with d2t"
            )

    def _take_ids(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        stored = False
        for name, tensor in weights:
            if name != "d2t":
                yield name, _flat(name, tensor)
                continue
            stored = True
            if tuple(tensor.shape) != (self.spec.draft_vocab,):
                raise CheckpointError(
                    f"d2t has the shape {list(tensor.shape)}, and draft_vocab_size is {self.spec.draft_vocab}"
                )
            self.target_ids = self.target_ids + tensor.to(self.target_ids)
            if not 0 <= int(self.target_ids.min()) <= int(self.target_ids.max()) < self.spec.stack.vocab_size:
                raise CheckpointError(f"d2t names tokens that the model does not have; it has {self.spec.stack.vocab_size}")
        self._check_ids(stored)


def _flat(name: str, tensor: Tensor) -> Tensor:
    """Return a stored tensor in the head's shape; publishers store `mask_hidden` with leading dimensions of 1."""
    return tensor.reshape(-1) if name.endswith("mask_hidden") else tensor
