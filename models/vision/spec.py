"""What a vision tower is made of: plain data that a family reads from its config.json. Knows no family and no tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TowerNames:
    """Where a checkpoint keeps what: below the tower, or for parts of a layer below `<layers>.<index>`.

    `table`, `class_token` and `scales` are whole names of tensors, the others names of layers with a weight and a bias.

    Args:
        qkv: one name for all three, or one each.
        mlp: two names (in, out) of an MLP, or three (gate, up, out) of a gated one.
    """

    patch: str = "patch_embed.proj"
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
    """Queries and keys are turned by a patch's row and column.

    Args:
        order: how the frequencies of a head of size d are dealt out. "blocks": a first half turns by rows, a second by
            columns, each with d / 4 frequencies of `theta ** (-4i / d)`. "alternating": the same frequencies, column and
            row taking turns. "even_odd": d / 2 frequencies of `theta ** (-2i / d)`, the even ones first, by rows, then
            the odd ones, by columns.
        neighbours: pairs are neighbouring numbers (0 1, 2 3, ...), else a half turns against the other.
    """

    theta: float = 10000.0
    order: str = "blocks"
    neighbours: bool = False


@dataclass(frozen=True)
class TableSpec:
    """A learned row for every place of a square picture, added to its patches.

    Args:
        side: places along each side.
        fit: to a grid of another size. "exact": there is no other. "bilinear", "bicubic": the table is resampled.
            "buckets": a patch takes the place in which its upper left corner lies.
        align_corners: the outermost places stay the outermost places, else the outermost edges.
        antialias: a table that is made smaller is low-passed first.
        frames: further frames of an item are told apart by sinusoids for at most so many; 0: they are not.
    """

    side: int
    fit: str = "exact"
    align_corners: bool = False
    antialias: bool = False
    frames: int = 0


@dataclass(frozen=True)
class TowerSpec:
    """A pre-norm transformer over patches of pictures. Rows see their own frame (or window, or item) only.

    Args:
        depth: layers in the checkpoint; those behind the last one of `features` are not built.
        inner: width inside the MLP; `act`: its activation, that of the gate where it is gated (`names.mlp`).
        patch_dim: numbers of a patch: channels x frames x height x width; 0: what is given are rows, which go in as they are.
        merge: patches come in squares of merge x merge, row by row of squares; 1: row by row.
        rms: norms are RMSNorm, else LayerNorm.
        patch_bias, qkv_bias, out_bias, mlp_bias: which products have one.
        qk_norm: queries and keys are normed per head ("head") or over all heads ("all") before they are turned.
        class_token: a learned row before those of each frame; `keep_class`: it is among the result's rows.
        patch_norm, pre_norm: before and after places are added to the patches. post_norm: of the last layer's result.
        layer_scale: what each part adds is scaled by a learned vector.
        window: squares along a window's side, 0 for none; `full_layers`: the layers that see whole frames all the same.
        across_time: frames of an item see one another.
        features: states that are returned, 0 before the first layer, i after layer i (counted from 1), in rising order.
            Empty: only the last.
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
    keep_class: bool = False
    patch_norm: bool = False
    pre_norm: bool = False
    post_norm: bool = False
    layer_scale: bool = False
    window: int = 0
    full_layers: frozenset[int] = frozenset()
    across_time: bool = False
    features: tuple[int, ...] = ()
    names: TowerNames = BLOCKS

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def gated(self) -> bool:
        return len(self.names.mlp) == 3

    @property
    def states(self) -> tuple[int, ...]:
        """`features`, the last one where none is named."""
        return self.features or (self.depth,)

    @property
    def unbuilt(self) -> tuple[str, ...]:
        """Beginnings of the names, below the tower, of stored tensors that no state in `features` needs."""
        last = self.states[-1]
        layers = tuple(f"{self.names.layers}.{i}." for i in range(last, self.depth))
        return layers if self.post_norm else (*layers, f"{self.names.post_norm}.")
