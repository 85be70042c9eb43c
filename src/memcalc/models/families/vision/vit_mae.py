"""ViT-MAE: an encoder that sees some patches of an image, and a small decoder that paints the others."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import with_head
from memcalc.models.families.vision.vit import VIT_DEFAULTS, vit_blocks
from memcalc.models.family import Family, table
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import PatchEmbedding, grid_of
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64


def _frozen(rows: int, hidden: int) -> Parameter:
    """Sinusoids that count as a parameter and are not trained."""
    table = Parameter(1, rows, hidden, group="embedding")
    table.trainable = False
    return table


def _argsort(x: Tensor) -> Tensor:
    """Where the elements of x come in order [b, n]; the sorted ones go."""
    _values, indices = x.tape.empty(x.shape, x.dtype), x.tape.empty(x.shape, INT64)
    return indices


def _columns(rows: Tensor, width: int) -> Tensor:
    """Indices of rows [b, n] as indices of their elements [b, n, width], a copy."""
    return ops.repeat(ops.unsqueeze(rows, -1), 1, 1, width)


class MaskedPatches(Module):
    """The patches of an image that are seen, after a class token."""

    scope = "embedding"

    def __init__(self, c: Config, hidden: int, count: int) -> None:
        self.cls_token = Parameter(1, 1, hidden, group="embedding")
        self.position_embeddings = _frozen(count + 1, hidden)
        self.patch_embeddings = PatchEmbedding(c.integer("num_channels"), hidden, c.integer("patch_size"))
        self.seen = int(count * (1 - c.probability("mask_ratio")))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels [b, c, height, width] to seen patches [b, m, h], the mask of all [b, n], and where each was [b, n]."""
        embeddings = self.patch_embeddings(pixels)
        count = embeddings.shape[1]
        embeddings = ops.add(embeddings, ops.narrow(self.position_embeddings, 1, count))
        embeddings, mask, restore = self._choose(embeddings)
        cls_token = ops.add(self.cls_token, ops.narrow(self.position_embeddings, 1, 1))
        cls_tokens = ops.expand(cls_token, embeddings.shape[0], -1, -1)
        return ops.cat([cls_tokens, embeddings], 1), mask, restore

    def _choose(self, sequence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, count, width = sequence.shape
        noise = sequence.tape.empty((batch, count), FP32)
        shuffle = _argsort(noise)
        restore = _argsort(shuffle)
        keep = ops.narrow(shuffle, 1, self.seen)
        seen = ops.gather(sequence, _columns(keep, width))
        mask = sequence.tape.empty((batch, count), FP32)
        mask = ops.gather(mask, restore)
        return seen, mask, restore


class MaskedEncoder(Module):
    """ViT over the patches that are seen."""

    def __init__(self, c: Config, hidden: int, count: int) -> None:
        self.embeddings = MaskedPatches(c, hidden, count)
        self.layers = vit_blocks(c)
        self.layernorm = LayerNorm(hidden)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels [b, c, height, width] to states [b, 1 + m, h], mask and order of all patches [b, n]."""
        embedded, mask, restore = self.embeddings(pixels)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden, None)
        return self.layernorm(hidden), mask, restore


class MaeDecoder(Module):
    """A mask token for each patch that was not seen, all patches in their order, blocks, and the pixels of each."""

    def __init__(self, c: Config, hidden: int, count: int) -> None:
        inner = c.replaced(
            **{
                key: c.integer(f"decoder_{key}")
                for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
            }
        )
        width = inner.integer("hidden_size")
        self.mask_token = Parameter(1, 1, width, group="embedding")
        self.decoder_pos_embed = _frozen(count + 1, width)
        self.decoder_embed = Linear(hidden, width, bias=True, group="embedding")
        self.decoder_layers: Stack = vit_blocks(inner, "decoder block")
        self.decoder_norm = LayerNorm(width)
        pixels = c.integer("patch_size") ** 2 * c.integer("num_channels")
        self.decoder_pred = Linear(width, pixels, bias=True, group="head")

    def forward(self, hidden: Tensor, restore: Tensor) -> Tensor:
        """States [b, 1 + m, h] and where each patch was [b, n] to pixels [b, n, c · patch²]."""
        hidden = self.decoder_embed(hidden)
        batch, seen, width = hidden.shape
        mask_tokens = ops.repeat(self.mask_token, batch, restore.shape[1] + 1 - seen)
        patches = ops.cat([ops.narrow(hidden, 1, seen - 1), mask_tokens], 1)
        patches = ops.gather(patches, _columns(restore, width))
        hidden = ops.cat([ops.narrow(hidden, 1, 1), patches], 1)
        hidden = ops.add(hidden, self.decoder_pos_embed)
        for layer in self.decoder_layers:
            hidden = layer(hidden, None)
        hidden = self.decoder_norm(hidden)
        painted = self.decoder_pred(hidden)
        return ops.narrow(painted, 1, painted.shape[1] - 1)


class MaskedAutoencoder(Network):
    """Encoder and decoder, trained to paint what was not seen."""

    reads_text = False

    def __init__(self, c: Config) -> None:
        hidden, (rows, columns) = c.integer("hidden_size"), grid_of(c)
        if rows != columns:
            raise ConfigError(f"{c.where} gives 'image_size' as {c.sides('image_size')}; ViT-MAE takes square images.")
        self.vit = MaskedEncoder(c, hidden, rows * columns)
        self.decoder = MaeDecoder(c, hidden, rows * columns)
        self.config, self.side, self.patch = c, rows, c.integer("patch_size")

    def forward(self, batch: Batch) -> Outputs:
        """Loss and the painted pixels [b, n, c · patch²]."""
        pixels = batch.pixels(self.config)
        latent, mask, restore = self.vit(pixels)
        painted = self.decoder(latent, restore)
        with batch.ids.tape.scoped("head and loss"):
            target = self._patches(pixels)
            if self.config.flag("norm_pix_loss"):
                mean = ops.mean(target)
                var = ops.mean(target)
                target = ops.div(ops.sub(target, mean), ops.pow(ops.add_scalar(var), 0.5))
            loss = ops.pow(ops.sub(painted, target))
            loss = ops.mean(loss, keepdim=False)
            loss = ops.div(_total(ops.mul(loss, mask)), _total(mask))
        return Outputs(loss, (painted, mask, restore))

    def _patches(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] by patch [b, n, c · patch²], a copy."""
        batch, channels = pixels.shape[:2]
        cut = ops.reshape(pixels, batch, channels, self.side, self.patch, self.side, self.patch)
        cut = ops.permute(cut, 0, 2, 4, 3, 5, 1)
        return ops.reshape(cut, batch, self.side**2, self.patch**2 * channels)


def _total(x: Tensor) -> Tensor:
    """The sum of all elements."""
    return ops.sum(ops.view(x, -1), 0)


def vit_mae(c: Config, architecture: str | None) -> Network:
    """ViT-MAE in pre-training."""
    return with_head(c, architecture, {"ViTMAEForPreTraining": lambda: MaskedAutoencoder(c)})


FAMILIES = table(
    Family(
        "vit_mae",
        vit_mae,
        VIT_DEFAULTS
        | {
            "decoder_num_attention_heads": 16,
            "decoder_hidden_size": 512,
            "decoder_num_hidden_layers": 8,
            "decoder_intermediate_size": 2048,
            "mask_ratio": 0.75,
        },
        blocks="encoder",
    )
)
