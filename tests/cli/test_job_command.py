"""A command is made for the options that a line names; help and errors know them all."""

from inspect import signature

import pytest
from support.cli_runs import refused

from memcalc.cli.commands.estimate import command
from memcalc.cli.options import declared


def test_a_line_names_the_options_that_are_prepared() -> None:
    few = list(signature(command.taking({"--batch", "--no-color", "--json", "4B"})).parameters)
    every = list(signature(command.taking(None)).parameters)
    assert {"batch", "json", "color", "params", "count"} <= {*few} < {*every}
    assert declared().keys() & {*few} == {"batch"}
    assert [name for name in every if name in few] == few


@pytest.mark.parametrize(
    "words",
    [
        ("--batch",),
        ("--batch", "2", "--sequence-length", "8"),
        ("--batc", "2"),
        ("one", "two", "--batch=2"),
        ("-x", "--params", "1B"),
    ],
)
def test_an_error_is_that_of_the_whole_command(words: tuple[str, ...]) -> None:
    """A word that asks for every option, here as the value of another, changes nothing."""
    assert refused(2, "estimate", *words) == refused(2, "estimate", "--html", "--help", *words)


def test_a_value_may_look_like_an_option() -> None:
    assert "--json" in refused(2, "estimate", "--params", "1B", "--gpu", "--json")
