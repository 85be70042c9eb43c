"""What the user did not say and the estimate took for granted: noted where it is taken."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Assumption:
    """One thing that was assumed."""

    code: str = field(metadata={"description": "What kind of thing it is; scripts may rely on it."})
    text: str = field(metadata={"description": "What was assumed, for people, and which option decides it."})
