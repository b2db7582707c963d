"""The protocol that every model implements, and the batch of rows it is called with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..kernels.kv_quant import bytes_per_head
from ..kernels.metadata import AttentionMetadata


@dataclass(frozen=True)
class CacheSpec:
    """Cache format of one layer: keys and values per token, or one state per sequence.

    Args:
        kind: "full": a key and a value per token of the sequence. "window": the same, but a row reads only the last `window`
            keys up to its own (and those of its bidirectional span), so that earlier blocks can be freed. "chunk": the
            sequence is cut into chunks of `window` tokens, and a row reads keys of its own chunk only. "latent": one row
            per token, which is key and value at once. "cross": a key and a value per encoder row, written once. "state":
            `head_dim` float32 numbers that sum up all earlier tokens; a step reads them and writes new ones elsewhere.
        kv_heads, head_dim: heads per key, and numbers per head.
        answer_window: how many of the answer's last tokens, its own included, a token of an answer reads beside the whole
            prompt. A ring of as many slots after the prompt keeps the answer's keys and values. None: it reads all of them.
        optional: sequences may have no encoder rows ("cross" only).
        quant_dtype: 8-bit dtype in which keys and values are stored (`kernels.kv_quant`); None: stored in `dtype`.
    """

    kind: str
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    quant_dtype: torch.dtype | None = None
    optional: bool = False
    answer_window: int | None = None

    def slot(self, token: int, prompt: int) -> int:
        """Return the slot of a token's key and value in a sequence whose answer begins after `prompt` tokens."""
        return token if self.answer_window is None or token < prompt else prompt + (token - prompt) % self.answer_window

    def num_slots(self, tokens: int, prompt: int) -> int:
        """Return the number of slots of the first `tokens` tokens of such a sequence."""
        return tokens if self.answer_window is None else min(tokens, prompt + self.answer_window)

    @property
    def planes(self) -> int:
        """Vectors per token: a key and a value, or one that is both."""
        return 1 if self.kind in ("latent", "state") else 2

    @property
    def storage_dtype(self) -> torch.dtype:
        if self.kind == "state":
            return torch.float32
        return self.dtype if self.quant_dtype is None else self.quant_dtype

    @property
    def width(self) -> int:
        """Numbers stored per head, including the scales of quantised keys and values."""
        return self.head_dim if self.quant_dtype is None else bytes_per_head(self.kv_heads, self.head_dim)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of `block_size` tokens, or of one state."""
        rows = 1 if self.kind == "state" else block_size
        return rows * self.planes * self.kv_heads * self.width * self.storage_dtype.itemsize


@dataclass(frozen=True)
class StepLimits:
    """The largest step that can be scheduled, for which memory is planned.

    Args:
        rows: rows of the step.
        keys: keys of all sequences, added up.
        longest: keys of the longest sequence.
        cross_keys: encoder rows of all sequences that are read by cross-attention, added up.
        int8: weights are quantised to 8 bits.
        quantized_kv: keys and values are cached in 8 bits.
        dequantized: weights of a quantised checkpoint are dequantised panel by panel.
    """

    rows: int
    keys: int
    longest: int
    device: torch.device
    int8: bool = False
    quantized_kv: bool = False
    dequantized: bool = False
    cross_keys: int = 0


@dataclass(frozen=True)
class AttentionCapture:
    """Cross-attention weights that one sequence of a step returns.

    Args:
        sequence: its index in the batch.
        heads: (layer, head) pairs.
        weights: float32 `[heads, rows, keys]` on the CPU, written by `Model.forward`.
    """

    sequence: int
    heads: Sequence[tuple[int, int]]
    weights: Tensor


@dataclass(frozen=True)
class HiddenCapture:
    """Hidden states after a decoder layer that one sequence of a step returns.

    Args:
        start: the sequence's first row.
        layers: number of layers before them; deepstack levels that follow the last of these are not added.
        states: float32 `[rows, hidden]` on the CPU, written by `Model.forward`.
    """

    start: int
    layers: int
    states: Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one step, packed over sequences.

    Args:
        input_ids: int64 `[rows]`; placeholder tokens may have any id of the vocabulary.
        positions: int64 `[axes, rows]`, with `rope_axes` axes.
        attn: attention metadata, one per cache; caches of equal spec share the object.
        kv_caches: one per entry of `cache_specs`: `[planes, num_blocks, block_size, kv_heads, width]`, keys before values;
            `[num_blocks, head_dim]` for states.
        embed_index: int64 `[n]`, the rows that `embed_rows` replaces (or is added to, if the model's stack adds encoder rows);
            None for a text-only step.
        embed_rows: `[n, row_size]` encoder rows: the first `hidden` numbers replace token embeddings, each further `hidden`
            numbers are a deepstack level, added to the residual stream after a layer of `DecoderSpec.deepstack`.
        cross_rows: `[n, hidden]` encoder rows whose keys and values are written to the "cross" caches in this step, at the
            slots of their `attn`; None if there are none.
        cross_mask: bool `[2, rows]`, if the encoder input is optional: rows of sequences that have one, and those of them from
            the item's token on. None if no sequence has one.
        modality_ids: int64 `[rows]`: for the rows of an item, its start and end tokens included, the number of its modality in
            `routes_by_modality`; 0 for text. None if the model does not route by modality.
        adapters: int64 `[rows]`: number of the row's adapter, counted from 1; 0 for none. None if no row has an adapter.
        token_types: int64 `[rows]`: 1 for the second text of a pair, else 0. None if no prompt is a pair.
        captures: cross-attention weights to return. hidden_captures: hidden states of layers to return.
    """

    input_ids: Tensor
    positions: Tensor
    attn: Sequence[AttentionMetadata]
    kv_caches: Sequence[Tensor]
    embed_index: Tensor | None = None
    embed_rows: Tensor | None = None
    cross_rows: Tensor | None = None
    cross_mask: Tensor | None = None
    modality_ids: Tensor | None = None
    adapters: Tensor | None = None
    token_types: Tensor | None = None
    captures: Sequence[AttentionCapture] = ()
    hidden_captures: Sequence[HiddenCapture] = ()


@runtime_checkable
class SupportsAdapters(Protocol):
    """A model whose requests may choose adapters (`request_adapters.AdaptedLayers`).

    Attributes:
        decoder_parts: names and modules whose layers get the rows of a step.
        head_parts: those that get the rows from which logits or classes are computed.
        encoder_parts: those that only `embed_multimodal` runs.
        absent: canonical paths of modules that other ranks hold.
        request_adapters: see `request_adapters.adapted_layers`.
        The others are those of Model.
    """

    adapters: Sequence[str]
    absent: Collection[str]
    prefixes: Sequence[tuple[str, str]]
    request_adapters: object | None

    @property
    def decoder_parts(self) -> Iterable[tuple[str, nn.Module]]: ...

    @property
    def head_parts(self) -> Iterable[tuple[str, nn.Module]]: ...

    @property
    def encoder_parts(self) -> Iterable[tuple[str, nn.Module]]: ...

    def is_unused(self, name: str) -> bool: ...

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]: ...


@runtime_checkable
class SupportsClassification(Protocol):
    """A model with a classification head."""

    num_labels: int

    def classify(self, hidden: Tensor, activate: bool) -> Tensor:
        """Return float32 `[n, num_labels]` for pooled states `[n, hidden]`: probabilities if `activate`, else logits."""


@runtime_checkable
class SupportsPooling(Protocol):
    """A model that says how hidden states become embeddings.

    Attributes:
        pooling: the `PoolingParams.pooling` that the checkpoint is made for.
        vector_size, token_size: length of a prompt's vector, and of the vectors of its tokens.
        normalizes: vectors are scaled to length 1 unless a request says otherwise.
        pools_items: mean pooling of a prompt with items takes only the items' tokens, start and end token included.
        vector_head: layers on the vector of a prompt, or None.
    """

    pooling: str
    normalizes: bool
    pools_items: bool
    vector_head: Callable[[Tensor], Tensor] | None
    vector_size: int
    token_size: int

    def project_hidden(self, hidden: Tensor, tokens: bool) -> Tensor:
        """Return embeddings of hidden states `[n, hidden]`: of tokens `[n, token_size]`, or of prompts `[n, vector_size]`."""


LogitsRule = Callable[[Sequence[int], Tensor], None]
"""Takes the tokens so far, and changes the logits `[..., vocab]` that follow them in place."""


@runtime_checkable
class SupportsRowDecoding(Protocol):
    """A model without a decoder whose tokens follow one another from the rows of a prompt (a transducer).

    Attributes:
        step_rows: rows of a sequence that a step decodes, at most. It bounds the time of a step.
        decodes_always: False: only rows of requests with logits processors are decoded.
    """

    step_rows: int
    decodes_always: bool

    def decode_rows(self, hidden: Sequence[Tensor], before: Sequence[Any], rules: Sequence[LogitsRule | None]) -> Sequence[Any]:
        """Decode the next hidden states `[n, hidden]` of each sequence, and return the state of its decoding after them.

        A result depends on its own sequence alone.

        Args:
            before: the states after earlier rows, None if there are none.
            rules: of each sequence, None if it has none. They apply to the logits of the next token, not to log probabilities.
        """

    def decoded(self, state: Any) -> Tensor:
        """Return the result of the pooling "tokens" for the state after the last row, float32 `[m, 4]` on the CPU.

        A row of it is a token, the encoder row that names it, its duration in encoder rows, and its log probability.
        """


@runtime_checkable
class SupportsSpeech(Protocol):
    """A model without a decoder that speaks its prompt, the tokens of phonemes."""

    def speak(self, ids: Tensor, hidden: Tensor, style: Tensor, speed: float, seed: int) -> tuple[Tensor, Tensor]:
        """Speak a prompt.

        Args:
            ids: int64 `[tokens]`. hidden: its hidden states `[tokens, hidden]`.
            style: of the voice, float32 `[n]`.
            speed: 2 halves the durations.
            seed: of the noise.

        Returns:
            Frames of each token, int64 `[tokens]`, and samples, float32 `[frames * samples per frame]`.

        Raises:
            InputError: the speech would be too long, or its durations are not finite.
        """


@runtime_checkable
class SupportsSimilarity(Protocol):
    """A model that compares vectors of texts and images."""

    def similarity(self) -> tuple[float, float | None]:
        """Return scale and bias of the cosine in the logit of a pair. No bias: logits are compared over several texts only."""


@runtime_checkable
class SupportsLargeViews(Protocol):
    """A model whose number of rows does not tell how large an image is.

    `most_patches`: patches of the largest view that memory is planned for. The engine sets it.
    """

    most_patches: int


@runtime_checkable
class SupportsEncoderRemoval(Protocol):
    """A model with cross-attention whose decoder can run on the encoder rows of another model."""

    def remove_encoder(self) -> None:
        """Remove the encoder; its weights are not loaded. Only `forward` and `compute_logits` can be called then."""


@runtime_checkable
class SupportsStreams(Protocol):
    """A model whose encoder keeps a state per live stream.

    `max_streams`: number of streams that memory is planned for. The engine sets it.
    `keeps_open_windows`: each pass over the open window of a stream is a request of its own. The state is freed with the one
    request that is held open.
    """

    max_streams: int
    keeps_open_windows: bool

    def stream_bytes(self, rows: int) -> int:
        """Return the bytes of the state of a stream. `rows`: those of the longest item."""

    def free_stream(self, stream: int) -> None:
        """Free the state of a stream. Unknown streams are ignored."""


class Model(Protocol):
    """A decoder with its encoders. Built as `cls(config: dict, dtype, device)` from the raw config.json."""

    rope_axes: int
    vocab_size: int
    hidden_size: int
    row_size: int  # numbers per encoder row: hidden_size * (1 + deepstack levels)
    max_positions: int  # config's max_position_embeddings
    cache_specs: Sequence[CacheSpec]  # one per attention layer or state, in the order of ForwardBatch.kv_caches
    routes_by_modality: Mapping[str, int]  # modality -> its number in ForwardBatch.modality_ids; empty: not routed
    adapters: Sequence[str]  # names of the adapters it was built with (`models.adapters`)
    can_generate: bool  # False in a checkpoint for embeddings, which stores no head
    recordable: bool  # `embed_multimodal` may be recorded as a graph, since it keeps no tensor between calls

    def embed_multimodal(self, modality: str, tensors: Mapping[str, object]) -> list[Tensor]:
        """Encode a merged batch of items (from `mm.fields.merge`): one `[rows, row_size]` tensor per item, in order."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final normed hidden states `[rows, hidden]`; write keys and values into the caches."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[n, vocab]` for hidden states `[n, hidden]`."""

    def forward_bytes(self, limits: StepLimits) -> int:
        """Return an upper bound of the bytes alive during `forward`, inputs and result included, without weights and caches."""

    def input_bytes(self, modality: str, rows: int) -> int:
        """Return an upper bound of the bytes of the processed tensors from which `rows` encoder rows are computed."""

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return an upper bound of the bytes alive while items with `rows` rows in total are encoded on `limits.device`."""

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Build the head that the checkpoint stores, if any. `headers`: of `weight_files.read_headers`, or empty."""

    def check_weights(self, headers: Mapping[str, Tensor]) -> None:
        """Compare names and shapes of the stored tensors with the model; CheckpointError as of `load_weights`."""

    def is_unused(self, name: str) -> bool:
        """Return True for a stored tensor that need not be read. `load_weights` ignores such tensors."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill and pack all weights from checkpoint names; CheckpointError for missing, surplus or misshapen tensors."""
