"""What all tests share."""

import gc


def pytest_collection_finish() -> None:
    """Let the collector pass over the thousands of tests, and look for garbage less often: a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
