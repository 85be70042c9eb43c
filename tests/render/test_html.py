"""Pages: complete in one file, small, accessible, and unmoved by what a model is called."""

import re
import time
from xml.etree import ElementTree

import pytest
from support.pages import HOSTILE, LLAMA_70B, Elements, hostile_pages, setup

from memcalc import InferenceSetup, ModelSpec, TrainingSetup
from memcalc.render import html
from memcalc.render.areas import COLOURS, INKS, TITLES
from memcalc.render.page_setup import Setup
from memcalc.timeline import timeline
from memcalc.units import format_bytes

ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "article", "figure", "div", "p", "h1", "h2"),
    *("svg", "path", "span", "small", "b", "i", "a", "table", "thead", "tbody", "tr", "th", "td"),
    *("details", "summary", "pre", "code", "ul", "li"),
}


@pytest.mark.parametrize("kind", ["one.html", "two.html"])
def test_a_hostile_name_is_text(kind: str) -> None:
    """No element and no attribute comes of it, and elements stay properly nested."""
    page = Elements(hostile_pages()[kind])
    assert page.open == []
    assert {tag for tag, _ in page.elements} <= ALLOWED
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert set(attributes) & {"src", "srcdoc", "action", "formaction"} == set()
        assert all(
            (value or "").startswith("#") for name, value in attributes.items() if name in ("href", "xlink:href")
        )
    assert "<script>document.title" in page.words
    assert "A" * 1000 not in re.sub(r"(?s)<h2>Made with.*", "", hostile_pages()[kind])


def test_a_hostile_name_leaves_a_picture_well_formed() -> None:
    root = ElementTree.fromstring(hostile_pages()["picture.svg"])
    kinds = {element.tag.split("}")[1] for element in root.iter()}
    assert kinds <= {"svg", "title", "desc", "style", "rect", "text", "path", "g", "circle"}
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
    words = "".join(root.itertext())
    assert "</title></style></svg><script>" in words
    assert words.replace("\n", "").isprintable()


@pytest.mark.parametrize("kind", ["one.html", "two.html", "picture.svg"])
def test_nothing_comes_from_elsewhere(kind: str) -> None:
    text = hostile_pages()[kind].replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"(?i)https?:|//[a-z]|@import|url\(|<script|<link|<iframe|<object|<embed", text)
    assert kind == "picture.svg" or "default-src 'none'; style-src 'unsafe-inline'" in text


def test_a_page_of_a_70b_model_is_small_and_soon_made() -> None:
    spec = ModelSpec.from_config(LLAMA_70B)
    job = TrainingSetup(precision="bf16", activation_checkpointing="full", seq_len=4096)
    began = time.process_time()
    drawn = timeline(spec, job, "H200", samples=600)
    page = html.page([Setup(drawn.report, drawn)] * 3, command=["memcalc"])
    assert time.process_time() - began < 2
    assert len(page.encode()) < 500_000
    assert len(html.page([Setup(drawn.report, drawn)]).encode()) < 150_000


def test_what_the_picture_shows_stands_in_tables() -> None:
    one = setup()
    page = Elements(html.page([one]))
    report = one.report
    for _, component in report.components.rows():
        assert format_bytes(component.peak_bytes) in page.words
    for title in TITLES:
        assert title in page.words
    for phase in ("forward", "backward", "step"):
        assert phase in page.words
    for assumption in report.assumptions:
        assert assumption.text in page.words
    assert report.peak.moment in page.words


def test_it_can_be_read_without_seeing_it_and_without_a_mouse() -> None:
    page = Elements(html.page([setup(), setup(heading="other")]))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("h1") == tags.count("title") == tags.count("main") == 1
    assert page.elements[0] == ("html", {"lang": "en"})
    pictures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    names = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert len(names) == sum("id" in attributes for _, attributes in page.elements)
    pins = [attributes for _, attributes in page.elements if attributes.get("class") == "pin"]
    assert len(pins) == 2
    for pin in pins:
        assert (pin["href"] or "")[1:] in names
        assert pin["aria-describedby"] in names
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in page.elements if tag == "th")


def test_colours_can_be_told_apart_and_text_on_them_read() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour, ink in zip(COLOURS, INKS, strict=True):
        light, dark = sorted((luminance(colour), luminance(ink)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
    assert len(set(COLOURS)) == len(TITLES) == 6


def test_setups_side_by_side_share_one_scale() -> None:
    small = setup(heading="small", job=TrainingSetup(seq_len=16, precision="bf16"))
    page = html.page([setup(heading="large"), small])
    assert page.count('class="sizes"') == 2
    scales = re.findall(r'<div class="sizes".*?</div>', page, re.DOTALL)
    assert scales[0] == scales[1]
    assert "2 setups side by side" in page
    assert re.search(r"−\d", page)


def test_inference_and_jobs_without_a_picture() -> None:
    one = setup(job=InferenceSetup(seq_len=128))
    assert "prefill" in html.page([one])
    without = Elements(html.page([Setup(one.report)]))
    assert "no picture over time" in without.words
    assert without.open == []


def test_a_fragment_is_for_notebooks() -> None:
    text = html.fragment([setup(HOSTILE)])
    assert text.startswith("<main")
    assert "<html" not in text
    assert not re.search(
        r"(?m)^(?!\s*(\.memcalc|@media|\}|/\*))[^<{]+\{", text.split("</style>")[0].split("<style>")[1]
    )
