"""A setup with what `verify` measured on this machine in place of what memcalc assumes of all."""

import os
from typing import TYPE_CHECKING

from memcalc.common.assumption import Assumption
from memcalc.verification.config_file import calibration_path

if TYPE_CHECKING:
    from memcalc.setup.setup import InferenceSetup, TrainingSetup
    from memcalc.tables.gpus import Gpu


def calibrated(
    setup: "TrainingSetup | InferenceSetup", gpu: "Gpu"
) -> "tuple[TrainingSetup | InferenceSetup, list[Assumption]]":
    """The setup, and a line for the assumptions where something that was measured is used.

    Raises MemcalcError where the file of calibrations is broken.
    """
    if not os.path.exists(calibration_path()):
        return setup, []
    from memcalc.verification.calibration import assumption_of, calibrations, matching, options_of, processes_of

    found = matching(gpu, processes_of(setup), calibrations())
    used = {} if found is None else options_of(found, frozenset(setup.model_fields_set))
    if found is None or not used:
        return setup, []
    return setup.model_copy(update=used), [assumption_of(found, used)]
