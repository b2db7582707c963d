"""Constants of a core, which callers know without asking it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CoreInfo:
    """Constants of a core.

    Args:
        max_model_len: maximum number of tokens of prompt and answer together.
        max_num_seqs: maximum number of sequences per step.
        vocab_size: token ids are below it.
        hidden_size: length of a hidden state.
        row_bytes: bytes of one encoder row.
        dtype: dtype of weights and encoder rows, such as "bfloat16".
        device: the model's device, such as "cpu" or "cuda:0".
        adapters: valid names of `EngineRequest.adapter`.
        modalities: modalities of items that the model takes.
        structured_outputs: True if requests may have a grammar.
        can_sleep: True if `sleep` works.
        can_generate: False if the checkpoint has no head, so that requests must have a `pooling` without `token_ids`.
        num_labels: classes of the checkpoint's classification head, 0 without one.
        labels_tokens: that head is made for tokens, not for whole prompts.
        cross_attention: number of decoder layers whose cross-attention weights a request can return, and of heads in each.
        captured_layers: largest `PoolingParams.layer` of a request, 0 if the model has none.
        pooling: the `PoolingParams.pooling` of requests that name none.
        normalizes: vectors have length 1 unless a request says otherwise.
        vector_size, token_size: length of a prompt's vector, and of the vectors of its tokens.
        logit_scale, logit_bias: as in `SupportsSimilarity`; None for other models.
        scheduling_policy: as in EngineConfig.
        bodies: which body computes the products and the attention on this CPU, as `op=body`.
    """

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    hidden_size: int
    row_bytes: int
    dtype: str
    device: str
    adapters: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()
    structured_outputs: bool = False
    can_sleep: bool = False
    can_generate: bool = True
    num_labels: int = 0
    labels_tokens: bool = False
    cross_attention: tuple[int, int] = (0, 0)
    captured_layers: int = 0
    pooling: str = "last"
    normalizes: bool = True
    vector_size: int = 0
    token_size: int = 0
    logit_scale: float | None = None
    logit_bias: float | None = None
    scheduling_policy: str = "fcfs"
    bodies: tuple[str, ...] = ()


def task_without_head(info: CoreInfo) -> str | None:
    """Return what a checkpoint without a language model head does, and the call for it; None if it has a head."""
    if info.can_generate:
        return None
    if info.labels_tokens:
        return "it classifies tokens; <<use_token_classify>>"
    if info.num_labels == 1:
        return "it scores pairs of a query and a document; <<use_score>>"
    if info.num_labels:
        return "it classifies prompts; <<use_classify>>"
    return "it computes vectors; <<use_embed>>"
