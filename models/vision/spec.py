"""The description of a vision tower: plain data that families read from config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TowerNames:
    """Names in the checkpoint, relative to the tower; those of a layer's parts are relative to `<layers>.<index>`.

    `table`, `class_token` and `scales` are names of tensors, the others names of layers with a weight and a bias.

    Args:
        qkv: one name for a joint projection, or three.
        mlp: two names (in, out), or three (gate, up, out) for a gated MLP.
    """

    patch: str = "patch_embed.proj"
    video_patch: str = "video_patch_embed.proj"
    table: str = "pos_embed.weight"
    class_token: str = "cls_token"
    patch_norm: str = "post_conv_layernorm"
    pre_norm: str = "pre_norm"
    post_norm: str = "post_layernorm"
    layers: str = "blocks"
    norms: tuple[str, str] = ("norm1", "norm2")
    qkv: tuple[str, ...] = ("attn.qkv",)
    out: str = "attn.proj"
    qk_norms: tuple[str, str] = ("attn.q_norm", "attn.k_norm")
    mlp: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")
    scales: tuple[str, str] = ("lambda_1", "lambda_2")


BLOCKS = TowerNames()
"""`blocks.<i>.attn.qkv` and so on."""

GATED_BLOCKS = TowerNames(mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))

ENCODER = TowerNames(
    patch="embeddings.patch_embedding",
    table="embeddings.position_embedding.weight",
    class_token="embeddings.class_embedding",
    pre_norm="pre_layrnorm",  # so spelled in every checkpoint
    layers="encoder.layers",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
)
"""`encoder.layers.<i>.self_attn.q_proj` and so on."""


@dataclass(frozen=True)
class RotarySpec:
    """Rotary positions: queries and keys are rotated by a patch's row and column, and by its time if `order` is "frames".

    Args:
        order: assignment of the frequencies of a head of size d to the two axes. "blocks": the first half by rows, the second
            by columns, each with d / 4 frequencies of `theta ** (-4i / d)`. "alternating": the same frequencies, column and
            row alternating. "even_odd": d / 2 frequencies of `theta ** (-2i / d)`, the even ones first, by rows, then the odd
            ones, by columns. "columns_first": as "blocks", with the two halves exchanged. "frames": numbers i and i + d / 2 of
            a head have one frequency. The first quarter of these d / 2 is by time, then three eighths by rows and three by
            columns; n frequencies of an axis are `theta ** (-i / n)`. Pairs are adjacent numbers, each with its own angle.
        first: number of the first row and column; class tokens are not rotated.
        interleaved: rotated pairs are adjacent numbers (0 1, 2 3, ...); otherwise the two halves of a head.
    """

    theta: float = 10000.0
    order: str = "blocks"
    interleaved: bool = False
    first: int = 0

    @property
    def unequal_angles(self) -> bool:
        """True if the two numbers of a pair are rotated by different angles."""
        return self.order == "frames"


@dataclass(frozen=True)
class TableSpec:
    """Learned position embeddings of a square image, added to its patches.

    Args:
        side: positions along each side.
        fit: how the table is fitted to a grid of another size. "exact": not at all (refused). "corner": its upper left part is
            used. "bilinear", "bicubic": it is
            resampled. "square": it is resampled, bilinearly, to a square of the grid's longer side, of which the upper left
            part is used. "buckets": a patch takes the position in which its upper left corner lies; "ratio_buckets" and
            "step_buckets" do too, but round the corner's place differently (`positions.py`).
        align_corners: resampling keeps the centres of the corner positions in place, otherwise their outer edges.
        antialias: the table is low-pass filtered before it is downsampled.
        frames: most frames of an item; they get sinusoidal time embeddings. 0: no time embeddings.
    """

    side: int
    fit: str = "exact"
    align_corners: bool = False
    antialias: bool = False
    frames: int = 0


@dataclass(frozen=True)
class TowerSpec:
    """A transformer over patches, pre-norm unless `norms_after`. Patches attend within their frame (or window, or item).

    Args:
        depth: layers in the checkpoint; those after the last one in `features` are not built.
        kv_heads: heads of keys and values; 0: as many as `heads`. attention_dim: numbers of a head; 0: those of `width` divided
            by `heads`.
        inner: width of the MLP; `act`: its activation (of the gate, if `names.mlp` has one).
        patch_dim: numbers per patch: channels x frames x height x width; 0: the input consists of rows, not of patches.
        joined_frames: a patch of a video is this many frames long and has a projection of its own, unless it is 1.
        merge: patches come in squares of merge x merge, row by row of squares; 1: row by row.
        rms: norms are RMSNorm, otherwise LayerNorm.
        patch_bias, qkv_bias, out_bias, mlp_bias: these projections have a bias.
        qk_norm: queries and keys are normed per head ("head") or over all heads ("all") before rotation.
        class_token: each frame starts with a learned row, which has the first position of the table. class_copies: it starts
            with this many copies of the row. registers: each frame starts with this many learned rows instead, which have no
            positions. keep_class: these rows are part of the result.
        min_frame: patches of the smallest frame, from which the number of learned rows follows in the memory plan; 0: those
            of the table.
        patch_norm, pre_norm: norms before and after position embeddings are added. post_norm: norm after the last layer.
        norms_after: attention and MLP are normed after them, before their outputs are added.
        layer_scale: the outputs of attention and MLP are scaled by a learned vector.
        window: squares along a window's side, 0 for none. full_layers: layers that attend to whole frames.
        temporal_attention: patches attend to all frames of their item.
        features: hidden states to return, ascending: 0 before the first layer, i after layer i (counted from 1). Empty: the
            last one.
    """

    depth: int
    width: int
    heads: int
    inner: int
    patch_dim: int
    act: str = "gelu"
    merge: int = 1
    eps: float = 1e-6
    rms: bool = False
    patch_bias: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    qk_norm: str | None = None
    rotary: RotarySpec | None = None
    table: TableSpec | None = None
    class_token: bool = False
    class_copies: int = 1
    registers: int = 0
    keep_class: bool = False
    min_frame: int = 0
    patch_norm: bool = False
    pre_norm: bool = False
    post_norm: bool = False
    norms_after: bool = False
    layer_scale: bool = False
    window: int = 0
    full_layers: frozenset[int] = frozenset()
    temporal_attention: bool = False
    features: tuple[int, ...] = ()
    names: TowerNames = BLOCKS
    kv_heads: int = 0
    attention_dim: int = 0
    joined_frames: int = 1

    @property
    def head_dim(self) -> int:
        return self.attention_dim or self.width // self.heads

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def first_rows(self) -> int:
        """Learned rows at the start of each frame."""
        return self.registers or self.class_copies * self.class_token

    @property
    def gated(self) -> bool:
        return len(self.names.mlp) == 3

    @property
    def states(self) -> tuple[int, ...]:
        """The hidden states to return: `features`, or the last one."""
        return self.features or (self.depth,)

    @property
    def unbuilt(self) -> tuple[str, ...]:
        """Prefixes, below the tower, of stored tensors that no state in `features` needs."""
        last = self.states[-1]
        layers = tuple(f"{self.names.layers}.{i}." for i in range(last, self.depth))
        return layers if self.post_norm else (*layers, f"{self.names.post_norm}.")
