"""The decoder that most families are, and the language model around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.models.common.fused_lm_head import fused_lm_head
from memcalc.models.common.lm_losses import LanguageLoss
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.load_balancing_loss import load_balancing_loss
from memcalc.nn.layers.losses import causal_lm_loss, with_z_loss
from memcalc.nn.layers.masks import RECURRENT, SAME, causal_mask, recurrent_mask
from memcalc.nn.layers.routers import Routed
from memcalc.nn.model import Batch, Network, Outputs, positions
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack


class DecoderModel(Module):
    """Embedding, rotary embedding, a stack of decoder blocks and a final norm (LlamaModel).

    `windows` are the kinds of mask that the layers ask for by `layer.module.self_attn.window`: None for full attention,
    else the sliding window in tokens. A rotary embedding that answers with a dict has a pair for each window. On their
    way into the first block the embeddings are multiplied by a number if `scaled`, dropped out, and normalised if
    `norm_first`, by the norm that also stands behind the last block. Positions are passed to the blocks, made but only
    held, or not made at all; those that are given are held. With `all_masks`, every block gets all masks by window.
    With `rebinds`, dropout takes over the embeddings' name, so that they go. `chunked` windows are those of Llama 4.
    With `masked`, masks are made where kernels could do without; with `carries`, what a block gives beside its hidden
    states goes to the next one. `uncounted`: the layer that the model asks how many tokens were seen caches none.
    """

    def __init__(
        self,
        embed_tokens: Module,
        layers: Stack,
        norm: Module,
        rotary_emb: Module | None,
        windows: Iterable[int | None] = (None,),
        *,
        scaled: bool = False,
        dropout: float = 0.0,
        norm_first: bool = False,
        positions: Literal["passed", "held", "none"] = "passed",
        all_masks: bool = False,
        rebinds: bool = False,
        chunked: bool = False,
        masked: bool = False,
        carries: bool = False,
        uncounted: bool = False,
    ) -> None:
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.norm = norm
        self.rotary_emb = rotary_emb
        self.windows = tuple(windows)
        self.scaled, self.dropout, self.norm_first = scaled, dropout, norm_first
        self.positions = positions
        self.all_masks = all_masks
        self.rebinds = rebinds
        self.chunked, self.masked, self.carries, self.uncounted = chunked, masked, carries, uncounted

    def forward(
        self,
        ids: Tensor,
        padding: bool,
        embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        between: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h].

        Embeddings that are there already (images among them) are taken, and positions that are not simply the tokens'.
        `between` is what is done to the states behind each block.
        """
        inputs_embeds = self.embed_tokens(ids) if embeds is None else embeds
        del embeds
        if self.scaled:
            inputs_embeds = ops.mul_scalar(inputs_embeds)
        if (cache := run_context(ids).cache) is not None:
            for block in self.layers.blocks:
                attention, window = _mixer(block)
                if window != RECURRENT:
                    cache.register_layer(attention, window, block.copies, inputs_embeds)
        given = position_ids is not None
        if position_ids is None and self.positions != "none":
            position_ids = positions(ids.tape, ids.shape[1])
        masks = {window: self._mask(ids, inputs_embeds, padding, window) for window in self.windows}
        hidden = ops.dropout(inputs_embeds, self.dropout)
        if self.rebinds:
            inputs_embeds = hidden
        rotation = None if self.rotary_emb is None else self.rotary_emb(hidden, position_ids)
        if self.norm_first:
            hidden = self.norm(hidden)
        passed = position_ids if self.positions == "passed" and not given else None
        carried: Tensor | None = None
        for layer in self.layers:
            window = _mixer(layer.module)[1]
            turn = rotation[window] if isinstance(rotation, dict) else rotation
            mask = masks if self.all_masks else masks[window]
            more = {"carried": carried} if self.carries else {}
            out = layer(hidden, rotation=turn, mask=mask, position_ids=passed, **more)
            hidden, carried = out if isinstance(out, tuple) else (out, None)
            del out, more
            if self.carries and carried is not None:
                carried.storage.allocation.handed_over = False  # several blocks may pass on what one made
            if between is not None:
                _behind = hidden  # what came out of a block stays until the next is through
                hidden = between(layer.traced.position, hidden)
        return self.norm(hidden)  # type: ignore[no-any-return]

    def _mask(self, ids: Tensor, hidden: Tensor, padding: bool, window: int | None) -> Tensor | None:
        """The mask of layers with this window."""
        if window == RECURRENT:
            return recurrent_mask(ids, padding)
        own = [kind for _, kind in map(_mixer, self.layers.blocks) if kind != RECURRENT]
        strange = window != 0 and own and window not in own
        chunked = self.chunked and window is not None
        cached = own[0] if strange else SAME
        past = 0 if self.uncounted else None
        return causal_mask(hidden, padding, window, past=past, cached=cached, chunked=chunked, always=self.masked)


def _mixer(block: Module) -> tuple[Module, int | None]:
    """What mixes tokens in a decoder block, its attention or a mixer in its place, and that one's window."""
    parts = vars(block)
    mixer = parts["self_attn"] if "self_attn" in parts else parts["mixer"]
    return mixer, getattr(mixer, "window", None)


class CausalLM(Network):
    """A decoder with a language-model head. `tied_to` is the embedding whose table the head shares, if it does.

    `bend` is what is done to the logits one after another before the loss: scaling, soft capping. With `cast`, hidden
    states go to the head in the dtype of its weight (Mamba). `loss` is None where it is Transformers' own.
    """

    loss: LanguageLoss | None = None
    balanced: bool = False
    """Whether routers give their logits to an auxiliary loss."""
    bounded: bool = False
    """Whether a loss keeps the logits' normaliser small (`z_loss_coefficient`)."""

    def __init__(
        self,
        model: Module,
        hidden: int,
        vocab: int,
        *,
        tied_to: Embedding | None,
        bend: Sequence[Callable[[Tensor], Tensor]] = (),
        cast: bool = False,
        bias: bool = False,
    ) -> None:
        self.model = model
        self.lm_head = Linear(hidden, vocab, bias=bias, group="LM head")
        if tied_to is not None:
            self.lm_head.weight = tied_to.weight
        self.bend = tuple(bend)
        self.cast = cast

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits."""
        self.listen(batch.ids.tape)
        hidden = self.model(batch.ids, batch.padding)  # it stays until the last loss is there
        return self.conclude(batch, hidden)

    def listen(self, tape: Tape) -> None:
        """Note what routers give from here on, where there is a loss of it."""
        run_context(tape).router_outputs = [] if self.balanced else None

    def conclude(self, batch: Batch, hidden: Tensor, kept: tuple[Any, ...] = ()) -> Outputs:
        """Loss and logits as `finish` gives them, and the losses beside that of the tokens."""
        tape, outputs = batch.ids.tape, self.finish(batch, hidden, kept)
        run = run_context(tape)
        if run.router_outputs:
            with tape.scoped("experts"):
                self._balance(batch, outputs, run.router_outputs)
        run.router_outputs = None
        if self.bounded and outputs.loss is not None:
            outputs.loss = with_z_loss(outputs.loss, outputs.returned[0])
        return outputs

    def _balance(self, batch: Batch, outputs: Outputs, routed: list[Routed]) -> None:
        """Add the loss of the routers, which the output object keeps as it keeps their logits."""
        auxiliary = load_balancing_loss(batch.ids, routed, padding=batch.padding)
        outputs.returned = (*outputs.returned, auxiliary, *(layer.logits for layer in routed))
        if outputs.loss is not None:
            outputs.loss = ops.add_(outputs.loss, ops.mul_scalar(auxiliary))

    def finish(self, batch: Batch, hidden: Tensor, kept: tuple[Any, ...] = ()) -> Outputs:
        """Loss and logits from hidden states [b, s, h]. The output object keeps `kept` too."""
        tape = batch.ids.tape
        run = run_context(tape)
        if run.hidden_states is not None:
            run.hidden_states.append((hidden, 1))
        if run.cache is not None and not run.all_logits:
            hidden = ops.narrow(hidden, 1, 1)  # generation needs the logits of the last token only
        with tape.scoped("LM head and loss"):
            if batch.scored_tokens is not None:
                return fused_lm_head(self.lm_head, hidden, batch)
            if self.loss is not None and batch.labels is not None:
                if self.loss.is_behind:
                    hidden = hidden if self.loss.keep is None else ops.narrow(hidden, 1, self.loss.keep)
                    logits = self.logits(hidden)
                    return Outputs(None, (logits, *kept), partial(self.loss.loss_from_logits, labels=batch.labels))
                loss, held = self.loss(self.lm_head, self.logits, hidden, batch.labels)
                return Outputs(loss, (*held, *kept))
            if batch.logits_to_keep is not None:
                hidden = ops.narrow(hidden, 1, batch.logits_to_keep)
            logits = self.logits(hidden)
            return Outputs(
                None if batch.labels is None else causal_lm_loss(logits, batch.labels, counts_items=batch.counts_items),
                (logits, *kept),
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [b, s, V] of hidden states [b, s, h]. What the head saves stays on the device."""
        with hidden.tape.without_offloading():
            logits: Tensor = self.lm_head(ops.to(hidden, self.lm_head.weight.dtype) if self.cast else hidden)
        for function in self.bend:
            logits = function(logits)
        return logits
