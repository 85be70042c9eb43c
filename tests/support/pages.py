"""Pages and pictures to test: of a usual job, and of a model with a hostile name."""

from html.parser import HTMLParser

from memcalc import InferenceSetup, ModelSpec, TrainingSetup
from memcalc.render import html, svg
from memcalc.render.page_setup import Setup
from memcalc.timeline import timeline
from support.shapes import decoder

HOSTILE = (
    "</title></style></svg><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<svg onload=alert(1)>'\"`${7*7}{{7*7}}&lt;script&gt;&#x3c;b&#x3e; javascript:alert(1) ]]> --> "
    "\x1b[2J\x00\x07\u202e\ud800" + "A" * 10_000
)
"""Markup, entities, escapes, control and bidirectional characters, a lone surrogate, ten thousand letters."""

LLAMA_70B = decoder(8192, 80, 64, 8, 28672, 128256)


def setup(name: str = "model", *, heading: str = "", job: TrainingSetup | InferenceSetup | None = None) -> Setup:
    """One setup of a page."""
    spec = ModelSpec.from_config(decoder(256, 6, 4, 2, 512, 1000), name=name)
    drawn = timeline(spec, job or TrainingSetup(batch=2, seq_len=128), "24GB", samples=300)
    return Setup(drawn.report, drawn, heading)


def hostile_pages() -> dict[str, str]:
    """Every kind of page and picture, by the suffix of its file, with a hostile name wherever one can stand."""
    one = setup(HOSTILE, heading=HOSTILE)
    command = ["memcalc", "timeline", HOSTILE]
    assert one.timeline is not None
    return {
        "one.html": html.page([setup(HOSTILE)], command=command),
        "two.html": html.page([one, setup(heading="other")], command=command),
        "picture.svg": svg.render(one.timeline, command=command),
    }


class Elements(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.words += data
