"""What the person wants to run: the options of a mode, checked against each other."""

from typing import Any, Self

from pydantic import model_validator

from memcalc.errors import UsageError
from memcalc.setup.conflicts import conflicts
from memcalc.setup.defaults import OF_PAIRS, OFFLOADS, WITH_REFERENCE
from memcalc.setup.inference_conflicts import engine_of, inference_conflicts
from memcalc.setup.inference_options import InferenceOptions
from memcalc.setup.sentences import choice_sentence
from memcalc.setup.training_options import TrainingOptions


class TrainingSetup(TrainingOptions):
    """One optimizer step of training on one GPU.

    Sizes are counts (sequences, tokens), never bytes. Every field is an option of the command line by the same name.

    Raises UsageError, in one sentence, for a value of the wrong kind and for options that exclude each other.
    """

    @property
    def reference_used(self) -> str:
        """The kind of reference model: the one asked for, else the default; none where the objective has none."""
        if self.objective not in WITH_REFERENCE:
            return "none"
        if self.reference_model is None and self.objective == "grpo" and self.trainer_used == "trl":
            return "none"  # its beta is 0 unless asked for
        return self.reference_model or ("copy" if self.lora_rank is None else "shared")

    def with_trainer_defaults(self) -> Self:
        """This setup with the defaults of its trainer for what was not given."""
        if self.parallel == "megatron":  # FusedAdam of Transformer Engine or Apex
            fused = self.optimizer == "adamw" and "optimizer_impl" not in self.model_fields_set
            return self.model_copy(update={"optimizer_impl": "fused"}) if fused else self
        if self.trainer_used == "plain":
            return self
        defaults: dict[str, object] = {"optimizer_impl": "fused"} if self.optimizer == "adamw" else {}
        if self.trainer_used == "trl":
            defaults["activation_checkpointing"] = "full"
        filled = self.model_copy(update={k: v for k, v in defaults.items() if k not in self.model_fields_set})
        adapted = self.trainer_used == "trl" and self.parallel == "zero3" and self.lora_rank is not None
        if adapted and filled.activation_checkpointing == "full":  # TRL 1.16 forces it, until DeepSpeed takes the other
            return filled.model_copy(update={"checkpoint_reentrant": True})
        return filled

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch: --batch counts pairs of a preference, and prompts of several completions."""
        return self.batch * (2 if self.objective in OF_PAIRS else self.num_generations)

    def check(self) -> None:
        """Raise UsageError for the first pair of options that exclude each other."""
        for sentence in conflicts(self):
            raise UsageError(sentence)


class InferenceSetup(InferenceOptions):
    """Prefill of a prompt and decoding of one token on one GPU.

    Raises UsageError, in one sentence, for a value of the wrong kind and for options of another engine.
    """

    @model_validator(mode="before")
    @classmethod
    def _engine_of_its_options(cls, values: Any) -> Any:
        """An option that only one engine has names it, where nobody did."""
        if not isinstance(values, dict) or "engine" in values:
            return values
        meant = engine_of(name for name, value in values.items() if value is not None)
        return values if meant is None else {**values, "engine": meant}

    def check(self) -> None:
        """Raise UsageError for a way of offloading that is none, and for options of another engine."""
        if self.cpu_offload not in (None, *OFFLOADS):
            raise UsageError(choice_sentence("--cpu-offload", self.cpu_offload, OFFLOADS))
        for sentence in inference_conflicts(self):
            raise UsageError(sentence)
