"""Gemma 3n's layer: streams that are predicted and corrected around attention and a sparse MLP on one of them."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.nn.layers.gemma_shared_kv import PowerRMSNorm, SharedKeyValues, SharingAttention
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.rotary import Rotation
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32


class LaurelBlock(Module):
    """A residual of low rank beside attention (`Gemma3nTextLaurelBlock`)."""

    scope = "residual stream"

    def __init__(self, hidden: int, rank: int) -> None:
        self.linear_left = Linear(hidden, rank, group="other")
        self.linear_right = Linear(rank, hidden, group="other")
        self.post_laurel_norm = PowerRMSNorm(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        states = self.linear_left(hidden)
        states = self.linear_right(states)
        return ops.add(hidden, self.post_laurel_norm(states))


class SparseMLP(Module):
    """A gated MLP whose gate keeps only its largest values where `sparse` (`activation_sparsity_pattern`)."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int, act: str, *, sparse: bool) -> None:
        self.gate_proj = Linear(hidden, width, group="MLP")
        self.up_proj = Linear(hidden, width, group="MLP")
        self.down_proj = Linear(width, hidden, group="MLP")
        self.act = activation(act)
        self.sparse = sparse

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        gate = self.gate_proj(hidden)
        if self.sparse:
            gate = _gaussian_topk(gate)
        activations = self.act(gate)
        up = self.up_proj(hidden)
        return self.down_proj(ops.mul(activations, up))


def _gaussian_topk(inputs: Tensor) -> Tensor:
    """What lies above the mean plus so many standard deviations."""
    multiplier = inputs.tape.empty((), inputs.dtype)
    mean = ops.mean(inputs)
    deviation = ops.std(inputs)
    cutoff = ops.add(mean, ops.mul(deviation, multiplier))
    return ops.relu(ops.sub(inputs, cutoff))


class AltUp(Module):
    """Predicts every stream from all of them, and corrects the predictions by what a layer made of the active one."""

    scope = "residual stream"

    def __init__(self, hidden: int, streams: int, *, clips: bool) -> None:
        self.streams, self.clips = streams, clips
        self.correct_output_scale = Parameter(hidden, group="other")
        self.correction_coefs = Linear(streams, streams, group="other")
        self.prediction_coefs = Linear(streams, streams**2, group="other")
        self.modality_router = Linear(hidden, streams, group="other")
        self.router_norm = PowerRMSNorm(hidden)
        self.router_input_scale = Buffer(dtype=None)

    def _modalities(self, x: Tensor) -> Tensor:
        inputs = ops.mul(self.router_norm(x), self.router_input_scale)
        routed = self.modality_router(inputs)
        return ops.to(ops.tanh(ops.to(routed, FP32)), x.dtype)

    def predict(self, hidden: Tensor) -> Tensor:
        """Streams [n, b, s, h] to predictions [n, b, s, h]."""
        with hidden.tape.scoped("residual stream"):
            modalities = self._modalities(ops.select(hidden, 0))
            coefs = self.prediction_coefs(modalities)
            coefs = ops.permute(ops.reshape(coefs, *modalities.shape[:-1], self.streams, self.streams), 0, 1, 3, 2)
            product = ops.matmul(ops.permute(hidden, 1, 2, 3, 0), coefs)
            predictions = ops.permute(product, 3, 0, 1, 2)
            product, predictions = ops.add_view_(product, predictions, hidden)
            return ops.to(ops.contiguous(predictions), hidden.dtype)

    def correct(self, predictions: Tensor, activated: Tensor) -> Tensor:
        """Predictions [n, b, s, h] and what the layer made of the active one [b, s, h], to [n, b, s, h]."""
        with activated.tape.scoped("residual stream"):
            modalities = self._modalities(activated)
            innovation = ops.sub(activated, ops.select(predictions, 0))
            innovation = ops.repeat(ops.unsqueeze(innovation, 0), self.streams)
            if self.clips and run_context(activated).training:
                weight = ops.clamp(self.correction_coefs.weight)
                coefs = ops.add_scalar(ops.linear(modalities, weight))
            else:
                coefs = ops.add_scalar(self.correction_coefs(modalities))
            coefs = ops.unsqueeze(ops.permute(coefs, 2, 0, 1), -1)
            corrected = ops.mul(innovation, coefs)
            corrected = ops.add_(corrected, predictions)
            return ops.to(ops.contiguous(corrected), activated.dtype)

    def scaled(self, corrected: Tensor) -> Tensor:
        """One stream [b, s, h] times a vector."""
        scale = self.correct_output_scale
        return ops.to(ops.mul(ops.to(corrected, scale.dtype), scale), corrected.dtype)


class Gemma3nBlock(Module):
    """One layer: attention and MLP on the active stream, and the layer's own input added to the others."""

    scope = "residual stream"

    def __init__(self, c: Config, attention: SharingAttention, mlp: Module) -> None:
        hidden, width, act = c.integer("hidden_size"), c.integer("hidden_size_per_layer_input"), "hidden_activation"
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = PowerRMSNorm(hidden)
        self.post_attention_layernorm = PowerRMSNorm(hidden)
        self.pre_feedforward_layernorm = PowerRMSNorm(hidden)
        self.post_feedforward_layernorm = PowerRMSNorm(hidden)
        self.act = activation(c.text(act))
        self.altup = AltUp(hidden, c.integer("altup_num_inputs"), clips=c.has("altup_coef_clip"))
        self.scales = c.flag("altup_correct_scale")
        self.laurel = LaurelBlock(hidden, c.integer("laurel_rank"))
        self.per_layer_input_gate = Linear(hidden, width, group="MLP")
        self.per_layer_projection = Linear(width, hidden, group="MLP")
        self.post_per_layer_input_norm = PowerRMSNorm(hidden)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        per_layer_input: Tensor,
        mask: Tensor | None,
        shared: SharedKeyValues,
        position_ids: Tensor,
    ) -> Tensor:
        """Streams [n, b, s, h] to [n, b, s, h]."""
        predictions = self.altup.predict(hidden)
        active = ops.select(predictions, 0)
        normed = self.input_layernorm(active)
        laurel = self.laurel(normed)
        attn, _weights = self.self_attn(normed, rotation, mask, shared)
        attn = self.post_attention_layernorm(attn)
        gated = ops.add(active, attn)
        attn_laurel = ops.mul_scalar(ops.add(gated, laurel))
        attn_norm = self.pre_feedforward_layernorm(attn_laurel)
        fed = self.mlp(attn_norm)
        fed_norm = self.post_feedforward_layernorm(fed)
        fed_gated = ops.add(attn_laurel, fed_norm)
        corrected = self.altup.correct(predictions, fed_gated)
        first = ops.clone(ops.select(corrected, 0))
        if self.scales:
            first = self.altup.scaled(first)
        first = self.per_layer_input_gate(first)
        first = self.act(first)
        first = ops.mul(first, per_layer_input)
        first = self.per_layer_projection(first)
        first = self.post_per_layer_input_norm(first)
        others = ops.narrow(corrected, 0, corrected.shape[0] - 1)
        corrected, others = ops.add_view_(corrected, others, first)
        return ops.copy_slice_(corrected, others)  # what Python's `x[1:] += y` assigns once more
