"""Servers whose launch lines are not read are no training."""

import pytest

from memcalc.errors import UsageError
from memcalc.run_configs.launch import launch
from memcalc.run_configs.shell import split


@pytest.mark.parametrize("module", ["sglang.launch_server", "lmdeploy.serve.openai.api_server"])
def test_other_servers_are_refused(module: str) -> None:
    with pytest.raises(UsageError, match="not"):
        launch(split(["python", "-m", module, "--model-path", "X/Y", "--tp", "2"], "the command line"))
