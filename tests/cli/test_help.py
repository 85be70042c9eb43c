"""The help of a command says what an option takes."""

from typing import get_args

from support.cli_runs import run

from memcalc.setup.sentences import value_type
from memcalc.setup.setup import TrainingSetup


def test_choices_are_listed() -> None:
    words = run("from-file", "--help", env={"COLUMNS": "200"}).stdout.split()
    for name in ("loss_implementation", "precision", "kernels"):
        assert set(get_args(value_type(TrainingSetup.model_fields[name].annotation))) <= set(words)
