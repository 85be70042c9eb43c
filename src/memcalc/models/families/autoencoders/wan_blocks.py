"""Blocks of AutoencoderKLWan: those of Wan 2.1, and Wan 2.2's, which have averages or repeated channels beside them.

Source: diffusers 0.42.1, models/autoencoders/autoencoder_kl_wan.py.
"""

from __future__ import annotations

from itertools import pairwise

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.nn.layers.causal_video import Caches, CausalConv3d, ChannelNorm, FrameAttention, Resample, ResidualBlock
from memcalc.nn.module import Module

Factors = tuple[int, int]
"""How much fewer (or more) frames there are, and how much fewer pixels of a side."""


class MidBlock(Module):
    """A residual block, attention, and a residual block."""

    scope = "mid block"

    def __init__(self, width: int) -> None:
        self.attentions = [FrameAttention(width)]
        self.resnets = [ResidualBlock(width, width) for _ in range(2)]

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, c, t, h, w] to the same."""
        x = self.resnets[0](x, caches)
        x = self.attentions[0](x, caches)
        return self.resnets[1](x, caches)


class UpBlock(Module):
    """Residual blocks, and an upsampler where there is one."""

    scope = "residual stream"

    def __init__(self, inputs: int, outputs: int, depth: int, upsampler: Module | None) -> None:
        self.resnets = [ResidualBlock(outputs if i else inputs, outputs) for i in range(depth)]
        self.upsamplers = [] if upsampler is None else [upsampler]

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        for resnet in self.resnets:
            x = resnet(x, caches)
        for upsampler in self.upsamplers:
            x = upsampler(x, caches)
        return x


class ResidualDownBlock(Module):
    """Residual blocks and a downsampler where there is one, beside an average of the input (WanResidualDownBlock)."""

    scope = "residual stream"

    def __init__(self, inputs: int, outputs: int, depth: int, downsampler: Resample | None) -> None:
        self.resnets = [ResidualBlock(outputs if i else inputs, outputs) for i in range(depth)]
        if downsampler is not None:
            self.downsampler = downsampler
        self.factors, self.outputs = _factors(downsampler), outputs

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        x_copy = ops.clone(x)
        for resnet in self.resnets:
            x = resnet(x, caches)
        if self.factors[1] > 1:
            x = self.downsampler(x, caches)
        return ops.add(x, averaged(x_copy, self.outputs, self.factors))


class ResidualUpBlock(Module):
    """Residual blocks, and an upsampler beside repeated channels where there is one (WanResidualUpBlock)."""

    scope = "residual stream"

    def __init__(self, inputs: int, outputs: int, depth: int, upsampler: Resample | None) -> None:
        self.resnets = [ResidualBlock(outputs if i else inputs, outputs) for i in range(depth)]
        if upsampler is not None:
            self.upsampler = upsampler
        self.factors, self.outputs = _factors(upsampler), outputs

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, inputs, t, h, w] to [b, outputs, t', h', w']."""
        first = id(self.resnets[0].conv1) not in caches
        x_copy = ops.clone(x)
        for resnet in self.resnets:
            x = resnet(x, caches)
        if self.factors[1] > 1:
            x = self.upsampler(x, caches)
            x = ops.add(x, repeated(x_copy, self.outputs, self.factors, first=first))
        del x_copy
        return x


def _factors(resample: Resample | None) -> Factors:
    return (1, 1) if resample is None else (2 if resample.timed else 1, 2)


def averaged(x: Tensor, outputs: int, factors: Factors) -> Tensor:
    """[b, c, t, h, w] to [b, outputs, t / time, h / side, w / side]: means of neighbours and channels (AvgDown3D)."""
    time, side = factors
    x = ops.pad(x, 2, -x.shape[2] % time)
    batch, channels, frames, height, width = x.shape
    sizes = frames // time, height // side, width // side
    x = ops.view(x, batch, channels, sizes[0], time, sizes[1], side, sizes[2], side)
    x = ops.contiguous(ops.permute(x, 0, 1, 3, 5, 7, 2, 4, 6))
    x = ops.view(x, batch, outputs, channels * time * side**2 // outputs, *sizes)
    return ops.mean(x, 2, keepdim=False)


def repeated(x: Tensor, outputs: int, factors: Factors, *, first: bool) -> Tensor:
    """[b, c, t, h, w] to [b, outputs, t · time, h · side, w · side], channels repeated (DupUp3D).

    `first`: of the frames that the first latent gives only the last is kept.
    """
    time, side = factors
    batch, _, frames, height, width = x.shape
    x = x.tape.empty((batch, outputs, time, side, side, frames, height, width), x.dtype)
    x = ops.contiguous(ops.permute(x, 0, 1, 5, 2, 6, 3, 7, 4))
    x = ops.view(x, batch, outputs, frames * time, height * side, width * side)
    return ops.narrow(x, 2, frames * time - (time - 1)) if first else x


class Encoder(Module):
    """Some frames at a time to moments."""

    scope = "residual stream"

    def __init__(self, c: Config, dims: list[int], timed: list[bool]) -> None:
        self.conv_in = CausalConv3d(c.integer("in_channels"), dims[0], 3, 3, 3, padding=(1, 1))
        blocks: list[Module] = []
        depth = c.integer("num_res_blocks")
        for level, (inputs, outputs) in enumerate(pairwise(dims)):
            last = level == len(timed)
            downsampler = None if last else Resample(outputs, outputs, down=True, timed=timed[level])
            if c.flag("is_residual"):
                blocks.append(ResidualDownBlock(inputs, outputs, depth, downsampler))
                continue
            blocks += [ResidualBlock(outputs if i else inputs, outputs) for i in range(depth)]
            blocks += [] if downsampler is None else [downsampler]
        self.down_blocks = blocks
        self.mid_block = MidBlock(dims[-1])
        self.norm_out = ChannelNorm(dims[-1], 3)
        self.conv_out = CausalConv3d(dims[-1], 2 * c.integer("z_dim"), 3, 3, 3, padding=(1, 1))

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, c, t, h, w] to [b, 2 z, t', h', w']."""
        x = self.conv_in.cached(x, caches)
        for block in self.down_blocks:
            x = block(x, caches)
        x = self.mid_block(x, caches)
        x = self.norm_out(x)
        x = ops.silu(x)
        return self.conv_out.cached(x, caches)


class Decoder(Module):
    """Some latents at a time to frames."""

    scope = "residual stream"

    def __init__(self, c: Config, dims: list[int], timed: list[bool]) -> None:
        self.conv_in = CausalConv3d(c.integer("z_dim"), dims[0], 3, 3, 3, padding=(1, 1))
        self.mid_block = MidBlock(dims[0])
        depth, residual = c.integer("num_res_blocks") + 1, c.flag("is_residual")
        self.up_blocks: list[Module] = []
        for level, (inputs, outputs) in enumerate(pairwise(dims)):
            made = outputs if residual else outputs // 2
            upsampler = Resample(outputs, made, down=False, timed=timed[level]) if level < len(timed) else None
            if residual:
                self.up_blocks.append(ResidualUpBlock(inputs, outputs, depth, upsampler))
            else:
                self.up_blocks.append(UpBlock(inputs // 2 if level else inputs, outputs, depth, upsampler))
        self.norm_out = ChannelNorm(dims[-1], 3)
        self.conv_out = CausalConv3d(dims[-1], c.integer("out_channels"), 3, 3, 3, padding=(1, 1))

    def forward(self, x: Tensor, caches: Caches) -> Tensor:
        """[b, z, t, h, w] to [b, c, t', h', w']."""
        x = self.conv_in.cached(x, caches)
        x = self.mid_block(x, caches)
        for block in self.up_blocks:
            x = block(x, caches)
        x = self.norm_out(x)
        x = ops.silu(x)
        return self.conv_out.cached(x, caches)
