"""Networks that read recordings: what goes in, and the heads that a config's `architectures` names."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, UsageError
from memcalc.models.common.heads import with_head
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.losses import ctc_loss, in_batch_loss, token_loss
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context


class SpeechNetwork(Network):
    """The model under a head; a recording of `batch.ids`'s length is an input of the step, ten seconds by default.

    It comes as samples, or as so many `features` for each of 50 frames a second.
    """

    def __init__(self, model: Module, features: int | None) -> None:
        self.model, self.features = model, features
        self.default_length = 160_000 if features is None else 500
        self.length_unit = "samples, 16,000 a second" if features is None else "frames, 50 a second"
        self.main_input = "input_values" if features is None else "input_features"

    def sound(self, batch: Batch) -> Tensor:
        """Samples [b, n] or features [b, n, f], the input of the step in place of token ids.

        Raises UsageError where recordings are padded.
        """
        if batch.padding:
            raise UsageError("memcalc describes recordings of one length; leave out --padding-mask.")
        tape = batch.ids.tape
        tape.inputs.remove(batch.ids.storage.allocation)
        shape = batch.ids.shape if self.features is None else (*batch.ids.shape, self.features)
        return tape.external_tensor(
            shape, run_context(tape).weights_dtype, OVERHEAD, "samples" if self.features is None else "audio features"
        )


class SpeechRecognizer(SpeechNetwork):
    """Characters by connectionist temporal classification."""

    def __init__(self, c: Config, model: Module, features: int | None = None) -> None:
        super().__init__(model, features)
        self.lm_head = Linear(c.integer("hidden_size"), c.integer("vocab_size"), bias=True, group="LM head")
        self.dropout = c.probability("final_dropout")

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, s, V]."""
        outputs = self.model(self.sound(batch), every=False)
        with batch.ids.tape.scoped("head and loss"):
            hidden = ops.dropout(outputs[0], self.dropout)
            logits = self.lm_head(hidden)
            loss = None
            if batch.labels is not None:
                loss = ctc_loss(logits, logits.shape[1])  # there cannot be more labels
        return Outputs(loss, (logits,))


class SpeechClassifier(SpeechNetwork):
    """A class per recording."""

    def __init__(self, c: Config, model: Module, features: int | None = None) -> None:
        super().__init__(model, features)
        if c.flag("use_weighted_layer_sum"):
            raise ConfigError(f"{c.where} asks for 'use_weighted_layer_sum', which memcalc does not describe.")
        hidden, width = c.integer("hidden_size"), c.integer("classifier_proj_size")
        self.projector = Linear(hidden, width, bias=True, group="head")
        self.classifier = Linear(width, c.num_labels(), bias=True, group="head")

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, classes]."""
        outputs = self.model(self.sound(batch), every=True)
        with batch.ids.tape.scoped("head and loss"):
            hidden = self.projector(outputs[0])
            pooled = ops.mean(hidden, 1, keepdim=False)
            logits = self.classifier(pooled)
            loss = None if batch.labels is None else token_loss(logits, batch.class_labels())
        return Outputs(loss, (logits,))


class SpeechEmbedder(SpeechNetwork):
    """The bare model: the mean of its states is one vector for a recording, trained to tell recordings apart."""

    def forward(self, batch: Batch) -> Outputs:
        """Loss and states [b, s, h]."""
        outputs = self.model(self.sound(batch), every=False)
        with batch.ids.tape.scoped("head and loss"):
            pooled = ops.mean(outputs[0], 1, keepdim=False)
            loss = None if batch.labels is None else in_batch_loss(pooled)
        return Outputs(loss, (outputs, pooled))


def speech(c: Config, architecture: str | None, model: Module, features: int | None = None) -> Network:
    """The model with the head that `architecture` names; CTC where it names none."""
    known: dict[str, Callable[[], Network]] = {
        "ForCTC": lambda: SpeechRecognizer(c, model, features),
        "ForSequenceClassification": lambda: SpeechClassifier(c, model, features),
        "Model": lambda: SpeechEmbedder(model, features),
    }
    return with_head(c, architecture, known)
