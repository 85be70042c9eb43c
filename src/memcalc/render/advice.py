"""What would make a job fit, as lines under the box."""

from collections.abc import Iterator

from memcalc.decide.what_fits import Advice
from memcalc.tables.gpus import Gpu
from memcalc.units import Unit, format_bytes


def render(advice: Advice, gpu: Gpu, unit: Unit) -> str:
    """The lines, or one that says that nothing known helps."""
    return "".join(line + "\n" for line in _lines(advice, gpu, unit))


def _lines(advice: Advice, gpu: Gpu, unit: Unit) -> Iterator[str]:
    yield f"What makes it smaller, each by itself (* fits {gpu.name}):"
    saved = [format_bytes(offer.saved_bytes, unit) for offer in advice.offers]
    widths = [max(map(len, column), default=0) for column in (saved, [offer.remedy.name for offer in advice.offers])]
    for size, offer in zip(saved, advice.offers, strict=True):
        mark = "*" if offer.fits else " "
        yield f" {mark} -{size:>{widths[0]}}  {offer.remedy.name:<{widths[1]}}  {offer.remedy.cost}"
        yield f"   {'':>{widths[0]}}   {offer.remedy.as_options()}"
    if advice.stack:
        yield f"It fits with {format_bytes(advice.process_bytes, unit)}, when these are added:"
        yield f"   {advice.together.as_options()}"
    else:
        yield f"With all of them together it does not fit {gpu.name}: take a larger GPU, several, or a smaller model."
    if advice.fewest_gpus is not None:
        yield f"As it is, it fits {advice.fewest_gpus} of them that share it:"
        yield f"   --gpus {advice.fewest_gpus} --parallel {advice.sharding}"
