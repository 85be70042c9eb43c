"""Parts of vision transformers: patches, attention, blocks that normalise first, and the tower that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from memcalc import ops
from memcalc.autograd.graph import require_gradient
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.layers.attention_backends import attend, attend_same_dtype, split_heads
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.rotary import Rotate, Rotation
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack


class PatchEmbedding(Module):
    """A convolution that makes a vector of each patch of an image.

    patch: height and width of a patch in pixels.
    flat: give a sequence [b, n, h] instead of a grid [b, h, rows, columns].
    bare: Transformers' module is the convolution alone, and others flatten what it gives.
    stride: (rows, columns) where patches overlap; None: the patch.
    """

    scope = "embedding"
    is_input_embedding = True

    def __init__(
        self,
        channels: int,
        hidden: int,
        patch: int,
        *,
        bias: bool = True,
        flat: bool = True,
        bare: bool = False,
        stride: tuple[int, int] | None = None,
    ) -> None:
        self.weight = Parameter(hidden, channels, patch, patch, group="embedding")
        self.bias = Parameter(hidden, group="embedding") if bias else None
        self.stride = stride or (patch, patch)
        self.flat, self.bare = flat, bare

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to patches [b, n, h], or to a grid [b, h, rows, columns]."""
        grid = ops.convolution(pixels, self.weight, self.bias, stride=self.stride)
        if self.bare and self.output_needs_gradient:
            require_gradient(grid)
        if not self.flat:
            return grid
        return ops.transpose(ops.view(grid, *grid.shape[:2], -1), 1, 2)


def grid_of(c: Config, size: int | None = None) -> tuple[int, int]:
    """Height and width of the image of a config, or of a square one of `size`, in patches."""
    patch = c.integer("patch_size")
    sides = c.sides("image_size")
    height, width = (size, size) if size is not None else sides
    if min(height, width) < patch:
        raise ConfigError(
            f"{c.where} has 'image_size' {sides}, which holds no patch of 'patch_size' {patch}; correct one."
        )
    return height // patch, width // patch


class VisionAttention(Module):
    """Attention without mask and cache.

    names: attribute names of the query, key, value and output projections.
    bias: the query, key and value projections have biases, unless `key_bias` or `value_bias` say otherwise.
    dropout: probability of dropout on the attention probabilities.
    together: query, key and value are all projected before one is split into heads (CLIP).
    own_dtype: the softmax of eager attention is in the dtype of the scores.
    norm: makes the norms of query and key.
    out_bias, out_dropout: bias of the output projection, dropout after it.
    rotate: applies the rotary embedding.
    """

    scope = "attention"

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
        bias: bool = True,
        dropout: float = 0.0,
        together: bool = False,
        own_dtype: bool = False,
        norm: Callable[[int], Module] | None = None,
        out_bias: bool = True,
        out_dropout: float = 0.0,
        key_bias: bool | None = None,
        value_bias: bool | None = None,
        rotate: Rotate | None = None,
    ) -> None:
        if hidden % heads:
            raise ConfigError(
                f"'num_attention_heads' {heads} does not divide 'hidden_size' {hidden} in the vision config."
            )
        self.head_dim = hidden // heads
        self.names = tuple(names)
        for name, own in zip(self.names[:3], (bias, key_bias, value_bias), strict=True):
            setattr(self, name, Linear(hidden, hidden, bias=bias if own is None else own, group="attention"))
        setattr(self, self.names[3], Linear(hidden, hidden, bias=out_bias, group="attention"))
        self.dropout, self.out_dropout = dropout, out_dropout
        self.together, self.own_dtype = together, own_dtype
        self.rotate = rotate
        self.q_norm: Module | None = norm(hidden) if norm else None
        self.k_norm: Module | None = norm(hidden) if norm else None

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[b, n, h] to [b, n, h], and the probabilities where they exist."""
        of_query, of_key, of_value, of_output = (vars(self)[name] for name in self.names)
        if self.together:
            query, key, value = of_query(hidden), of_key(hidden), of_value(hidden)
            if self.q_norm is not None and self.k_norm is not None:
                query = self.q_norm(query)
                key = self.k_norm(key)
            query = split_heads(query, self.head_dim)
            key = split_heads(key, self.head_dim)
            value = split_heads(value, self.head_dim)
        else:
            query = split_heads(of_query(hidden), self.head_dim)
            key = split_heads(of_key(hidden), self.head_dim)
            value = split_heads(of_value(hidden), self.head_dim)
        if self.rotate is not None and rotation is not None:
            query, key = self.rotate(query, key, *rotation)
        if self.own_dtype:
            out, weights = attend_same_dtype(query, key, value, mask, self.dropout, cast_back=False)
        else:
            out, weights = attend(query, key, value, mask, 1, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        out = ops.dropout(of_output(out), self.out_dropout)
        return out, weights


def drop_path(x: Tensor, p: float) -> Tensor:
    """Whole samples of x [b, ...] dropped with probability `p` (stochastic depth)."""
    if p == 0.0 or not x.tape.dropout_enabled:
        return x
    kept = ops.empty_like(x.tape.empty((x.shape[0], *(1,) * (len(x.shape) - 1)), x.dtype))
    return ops.mul(ops.mul_scalar(x), kept)


class VisionBlock(Module):
    """Norm, attention, add; norm, MLP, add.

    parts: its modules by attribute name, in the order of the checkpoint.
    roles: names of the first norm, the attention, the second norm and the MLP.
    scales: names of what multiplies the two branches (layer scale).
    dropout, path_dropout: probability of dropout on the branches, and of dropping a branch.
    residual_first: the residual, not the branch, is the first term of a sum, which decides the layout.
    """

    scope = "residual stream"

    def __init__(
        self,
        parts: Mapping[str, Module],
        roles: tuple[str, str, str, str],
        *,
        scales: tuple[str, str] | None = None,
        dropout: float = 0.0,
        path_dropout: float = 0.0,
        residual_first: bool = False,
    ) -> None:
        for name, module in parts.items():
            setattr(self, name, module)
        self.roles = roles
        self.scales = scales
        self.dropout, self.path_dropout = dropout, path_dropout
        self.residual_first = residual_first

    def forward(self, hidden: Tensor, mask: Tensor | None, rotation: Rotation | None = None) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        first, attention, second, mlp = (vars(self)[name] for name in self.roles)
        residual = hidden
        hidden = first(hidden)
        more = {} if rotation is None else {"rotation": rotation}
        hidden, _weights = attention(hidden, mask=mask, **more)
        if self.scales is not None:
            hidden = vars(self)[self.scales[0]](hidden)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = self._sum(drop_path(hidden, self.path_dropout), residual)
        residual = hidden
        hidden = second(hidden)
        hidden = mlp(hidden)
        if self.scales is not None:
            hidden = vars(self)[self.scales[1]](hidden)
        hidden = ops.dropout(hidden, self.dropout)
        return self._sum(drop_path(hidden, self.path_dropout), residual)

    def _sum(self, branch: Tensor, residual: Tensor) -> Tensor:
        return ops.add(residual, branch) if self.residual_first else ops.add(branch, residual)


class LayerScale(Module):
    """A trained factor for each element."""

    def __init__(self, hidden: int, name: str = "lambda1") -> None:
        self.name = name
        setattr(self, name, Parameter(hidden, group="norms"))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] to [..., h]."""
        return ops.mul(hidden, vars(self)[self.name])


Seen = tuple[Tensor, Tensor | None, tuple[Tensor, ...]]
"""Hidden states of patches [b, n, h], pooled [b, h] or None, and the states between blocks that were asked for."""


def kinds_of(depth: int, keep: Sequence[int] = ()) -> list[object]:
    """The kinds of a tower's blocks, of whose states (0: what goes into the first) those in `keep` are used.

    A block whose output is kept is one of its kind, and those after the last one are of another: backward never gets
    there. Nothing is kept of a tower whose last states are used.
    """
    last = max(keep, default=depth)
    return [i if i + 1 in keep else "layer" if i < last else "unused" for i in range(depth)]


class VisionTower(Module):
    """Embeddings of patches, blocks, norm and pooling of a vision transformer.

    before, after: a norm before and after the blocks.
    pool: pools the normalised states.
    norm_pooled: the norm is on the pooled first token only, and the states stay as they are (CLIP).
    keep: indices of the states between blocks that are returned too.
    rotary: makes the rotary table of the pixels.
    """

    def __init__(
        self,
        embeddings: Module,
        layers: Stack,
        *,
        before: Module | None = None,
        after: Module | None = None,
        pool: Module | None = None,
        norm_pooled: bool = False,
        keep: Sequence[int] = (),
        rotary: Module | None = None,
    ) -> None:
        self.embeddings = embeddings
        self.rotary = rotary
        self.pre_layernorm = before
        self.layers = layers
        self.post_layernorm = after
        self.head = pool
        self.norm_pooled = norm_pooled
        self.keep = tuple(keep)

    def forward(self, pixels: Tensor) -> Seen:
        """Pixels [b, c, height, width] to hidden states."""
        hidden = self.embeddings(pixels)
        if self.pre_layernorm is not None:
            hidden = self.pre_layernorm(hidden)
        embedded = hidden
        states = {0: embedded} if 0 in self.keep else {}
        more = {} if self.rotary is None else {"rotation": self.rotary(pixels)}
        for layer in self.layers:
            hidden = layer(hidden, None, **more)
            if layer.traced.position + 1 in self.keep:
                states[layer.traced.position + 1] = hidden
        kept = tuple(states[index] for index in self.keep)
        if self.norm_pooled:
            pooled = ops.select(hidden, 1)
            pooled = self.post_layernorm(pooled) if self.post_layernorm is not None else pooled
            return hidden, pooled, kept
        out = self.post_layernorm(hidden) if self.post_layernorm is not None else hidden
        return out, None if self.head is None else self.head(out), kept


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """[b, rows, columns, h] to [b, rows / factor, columns / factor, h · factor²]: squares side by side, two copies."""
    batch, rows, columns, hidden = x.shape
    x = ops.view(x, batch, rows, columns // factor, hidden * factor)
    x = ops.clone(ops.permute(x, 0, 2, 1, 3), contiguous=True)
    x = ops.view(x, batch, columns // factor, rows // factor, hidden * factor**2)
    return ops.clone(ops.permute(x, 0, 2, 1, 3), contiguous=True)


Reduce = Callable[[Tensor], Tensor]
"""Hidden states [b, n, h] to one vector per image [b, h]."""
