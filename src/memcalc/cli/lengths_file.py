"""`--lengths` as the path of a file with one length a line."""

import re
from collections import Counter

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError

LARGEST_FILE = 64 * 2**20
_WRITTEN_OUT = re.compile(r"[0-9.,x\s]+")


def read_lengths(text: str) -> str:
    """The lengths that `text` names: what it says itself, or those of the file, each with how often it comes.

    Raises UsageError for a file that cannot be read or has a line that is no length.
    """
    if _WRITTEN_OUT.fullmatch(text):
        return text
    try:
        with open(text, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError):
        return text  # told what it may be, with everything else that it is not
    if len(data) > LARGEST_FILE:
        raise UsageError(f"--lengths {quoted(text)} is larger than {LARGEST_FILE // 2**20} MiB; give a sample of it.")
    counts: Counter[int] = Counter()
    for number, line in enumerate(data.split(b"\n"), start=1):
        word = line.strip()
        if not word:
            continue
        if not re.fullmatch(rb"[0-9]{1,8}", word):
            shown = quoted(word[:40].decode("utf-8", "replace"))
            raise UsageError(f"line {number} of --lengths {quoted(text)} is {shown}, no whole number of tokens.")
        counts[int(word)] += 1
    if not counts:
        raise UsageError(f"--lengths {quoted(text)} has no line with a length.")
    return ",".join(f"{length}x{count}" for length, count in sorted(counts.items()))
