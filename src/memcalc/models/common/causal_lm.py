"""The decoder that most families are, and the language model around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.models.common.fused_lm_head import fused_lm_head
from memcalc.models.common.lm_losses import LanguageLoss
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.load_balancing_loss import load_balancing_loss
from memcalc.nn.layers.losses import causal_lm_loss, shifted_logits_loss, with_z_loss
from memcalc.nn.layers.masks import RECURRENT, SAME, causal_mask, padding_input, recurrent_mask
from memcalc.nn.model import Batch, Network, Outputs, positions
from memcalc.nn.module import Module
from memcalc.nn.run_context import Routed, run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64


class DecoderModel(Module):
    """Embedding, rotary embedding, a stack of decoder blocks and a final norm (LlamaModel).

    embed_tokens: ids [b, s] to embeddings [b, s, h].
    layers: decoder blocks; `self_attn` (or `mixer`) has a `window` in tokens, None for full attention.
    norm: the final norm.
    rotary_emb: gives (cos, sin), or a dict of such pairs by window; None if the model has none.
    windows: the windows for which a mask is made.
    embedding_multiplier: multiply the embeddings by a number; "beside" keeps them as they were too (AFMoE).
    dropout: probability of dropout on the embeddings.
    norm_embeddings: apply `norm` to the embeddings too (the same module as after the last block).
    position_ids: "passed" to the blocks, or "kept" alive without being passed, as given ones are; "always" passed, or
        "none" made.
    passes_all_masks: every block gets the dict of masks by window instead of its own.
    frees_inputs_embeds: dropout rebinds `inputs_embeds`, so that the embeddings are freed (Phi).
    chunked: windows are chunks (Llama 4).
    always_masks: make masks even where kernels need none.
    layers_return_state: what a block returns besides hidden states goes to the next one (indices of DeepSeek V3.2).
    counts_no_past: MiniMax asks layer 0 for the past length, and a linear-attention layer reports 0.
    """

    def __init__(
        self,
        embed_tokens: Module,
        layers: Stack,
        norm: Module,
        rotary_emb: Module | None,
        windows: Iterable[int | None] = (None,),
        *,
        embedding_multiplier: bool | Literal["beside"] = False,
        dropout: float = 0.0,
        norm_embeddings: bool = False,
        position_ids: Literal["passed", "always", "kept", "none"] = "passed",
        passes_all_masks: bool = False,
        frees_inputs_embeds: bool = False,
        chunked: bool = False,
        always_masks: bool = False,
        layers_return_state: bool = False,
        counts_no_past: bool = False,
    ) -> None:
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.norm = norm
        self.rotary_emb = rotary_emb
        self.windows = tuple(windows)
        self.embedding_multiplier, self.dropout, self.norm_embeddings = embedding_multiplier, dropout, norm_embeddings
        self.position_ids = position_ids
        self.passes_all_masks = passes_all_masks
        self.frees_inputs_embeds = frees_inputs_embeds
        self.chunked, self.always_masks, self.layers_return_state, self.counts_no_past = (
            chunked,
            always_masks,
            layers_return_state,
            counts_no_past,
        )

    def forward(
        self,
        ids: Tensor,
        padding: bool,
        embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        between: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h].

        embeds: embeddings [b, s, h] to use instead of those of `ids` (images are merged into them).
        position_ids: positions to use instead of a range (multimodal rotary embeddings).
        between: applied to the hidden states after each block, with the block's position.
        """
        inputs_embeds = self.embed_tokens(ids) if embeds is None else embeds
        del embeds
        if self.embedding_multiplier is True:
            inputs_embeds = ops.mul_scalar(inputs_embeds)
        if (cache := run_context(ids).cache) is not None:
            for block in self.layers.blocks:
                attention, window = _mixer(block)
                if window != RECURRENT:
                    cache.register_layer(attention, window, block.copies, inputs_embeds)
        if position_ids is None and (packed := run_context(ids).position_ids) is not None:
            position_ids, run_context(ids).packing_read = packed, RECURRENT not in self.windows
        if position_ids is None and self.position_ids != "none" and ids.tape.ring is not None:  # cut as the ids are
            position_ids = ids.tape.external_tensor(ids.shape, INT64, OVERHEAD, "position ids")
        given = position_ids is not None
        if position_ids is None and self.position_ids != "none":
            position_ids = positions(ids.tape, ids.shape[1])
        masks = {window: self._mask(ids, inputs_embeds, padding, window) for window in self.windows}
        hidden = ops.dropout(inputs_embeds, self.dropout)
        if self.embedding_multiplier == "beside":
            hidden = ops.mul_scalar(hidden)
        if self.frees_inputs_embeds:
            inputs_embeds = hidden
        rotation = None if self.rotary_emb is None else self.rotary_emb(hidden, position_ids)
        if self.norm_embeddings:
            hidden = self.norm(hidden)
        passed = (
            position_ids if self.position_ids == "always" or (self.position_ids == "passed" and not given) else None
        )
        carried: Tensor | None = None
        for layer in self.layers:
            window = _mixer(layer.module)[1]
            turn = rotation[window] if isinstance(rotation, dict) else rotation
            mask = masks if self.passes_all_masks else masks[window]
            more = {"carried": carried} if self.layers_return_state else {}
            out = layer(hidden, rotation=turn, mask=mask, position_ids=passed, **more)
            hidden, carried = out if isinstance(out, tuple) else (out, None)
            del out, more
            if self.layers_return_state and carried is not None:
                carried.storage.allocation.handed_over = False  # several blocks may pass on what one made
            if between is not None:
                _previous = hidden  # the output of a block stays until the next one is through
                hidden = between(layer.traced.position, hidden)
        return self.norm(hidden)  # type: ignore[no-any-return]

    def _mask(self, ids: Tensor, hidden: Tensor, padding: bool, window: int | None) -> Tensor | None:
        """The mask of layers with this window."""
        if window == RECURRENT:
            return recurrent_mask(ids, padding)
        used = [kind for _, kind in map(_mixer, self.layers.blocks) if kind != RECURRENT]
        unused = window != 0 and used and window not in used
        chunked = self.chunked and window is not None
        cached = used[0] if unused else SAME
        past = 0 if self.counts_no_past else None
        return causal_mask(hidden, padding, window, past=past, cached=cached, chunked=chunked, always=self.always_masks)


def _mixer(block: Module) -> tuple[Module, int | None]:
    """The module of a decoder block that mixes tokens (attention, or a mixer in its place), and its window."""
    parts = vars(block)
    mixer = parts["self_attn"] if "self_attn" in parts else parts["mixer"]
    return mixer, getattr(mixer, "window", None)


class CausalLM(Network):
    """A decoder with a language-model head (LlamaForCausalLM).

    model: ids and padding to hidden states.
    hidden, vocab: width and vocabulary.
    tied_to: the embedding whose table the head shares; None if it has its own.
    logit_transforms: applied to the logits in order before the loss (scaling, soft capping).
    cast_to_head_dtype: hidden states are cast to the dtype of the head's weight (Mamba).
    bias: the head has a bias.
    """

    loss: LanguageLoss | None = None
    router_aux_loss: bool = False
    """Add the load-balancing loss of the routers (`output_router_logits`)."""
    shifts_logits: bool = False
    """The loss is of the logits but for the last of each sequence, in their own dtype (Qwen2-Audio)."""
    z_loss: bool = False
    """Add the z-loss of the logits (`z_loss_coefficient`)."""

    def __init__(
        self,
        model: Module,
        hidden: int,
        vocab: int,
        *,
        tied_to: Embedding | None,
        logit_transforms: Sequence[Callable[[Tensor], Tensor]] = (),
        cast_to_head_dtype: bool = False,
        bias: bool = False,
    ) -> None:
        self.model = model
        self.lm_head = Linear(hidden, vocab, bias=bias, group="LM head")
        if tied_to is not None:
            self.lm_head.weight = tied_to.weight
        self.logit_transforms = tuple(logit_transforms)
        self.cast_to_head_dtype = cast_to_head_dtype

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits."""
        self.collect_router_logits(batch.ids.tape)
        hidden = self.model(batch.ids, batch.padding)  # it stays until the last loss is there
        return self.add_auxiliary_losses(batch, hidden)

    def collect_router_logits(self, tape: Tape) -> None:
        """Collect the routers' logits from here on, if there is a loss of them."""
        run_context(tape).router_outputs = [] if self.router_aux_loss else None

    def add_auxiliary_losses(self, batch: Batch, hidden: Tensor, kept: tuple[Any, ...] = ()) -> Outputs:
        """Loss and logits of `head_and_loss`, plus the load-balancing loss and the z-loss where the model has them."""
        tape, outputs = batch.ids.tape, self.head_and_loss(batch, hidden, kept)
        run = run_context(tape)
        if run.router_outputs:
            with tape.scoped("experts"):
                self._balance(batch, outputs, run.router_outputs)
        run.router_outputs = None
        if self.z_loss and outputs.loss is not None:
            outputs.loss = with_z_loss(outputs.loss, outputs.returned[0])
        return outputs

    def _balance(self, batch: Batch, outputs: Outputs, routed: list[Routed]) -> None:
        """Add the load-balancing loss. The output object keeps it, and the routers' logits."""
        auxiliary = load_balancing_loss(batch.ids, routed, padding=batch.padding)
        outputs.returned = (*outputs.returned, auxiliary, *(layer.logits for layer in routed))
        if outputs.loss is not None:
            outputs.loss = ops.add_(outputs.loss, ops.mul_scalar(auxiliary))

    def head_and_loss(self, batch: Batch, hidden: Tensor, kept: tuple[Any, ...] = ()) -> Outputs:
        """Loss and logits of hidden states [b, s, h]. The output object keeps `kept` too."""
        tape = batch.ids.tape
        run = run_context(tape)
        if run.hidden_states is not None:
            run.hidden_states.append((hidden, 1))
        if run.cache is not None and not run.all_logits:
            hidden = ops.narrow(hidden, 1, 1)  # generation needs the logits of the last token only
        with tape.scoped("head and loss"):
            if batch.scored_tokens is not None:
                return fused_lm_head(self.lm_head, hidden, batch)
            if self.loss is not None and batch.labels is not None:
                if self.loss.is_behind:
                    hidden = hidden if self.loss.keep is None else ops.narrow(hidden, 1, self.loss.keep)
                    logits = self.logits(hidden)
                    return Outputs(None, (logits, *kept), partial(self.loss.loss_from_logits, labels=batch.labels))
                loss, returned = self.loss(self.lm_head, self.logits, hidden, batch.labels)
                return Outputs(loss, (*returned, *kept))
            if batch.logits_to_keep is not None:
                hidden = ops.narrow(hidden, 1, batch.logits_to_keep)
            logits = self.logits(hidden)
            scored: Tensor | None = None
            if batch.labels is not None and self.shifts_logits:
                mask = padding_input(batch.ids) if batch.padding else None
                scored = shifted_logits_loss(logits, batch.labels, mask)
            elif batch.labels is not None:
                scored = causal_lm_loss(logits, batch.labels, counts_items=batch.counts_items)
            return Outputs(scored, (logits, *kept))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [b, s, V] of hidden states [b, s, h]. What the head saves stays on the device."""
        with hidden.tape.without_offloading():
            logits: Tensor = self.lm_head(
                ops.to(hidden, self.lm_head.weight.dtype) if self.cast_to_head_dtype else hidden
            )
        for function in self.logit_transforms:
            logits = function(logits)
        return logits
