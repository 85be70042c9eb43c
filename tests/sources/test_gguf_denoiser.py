"""GGUF files of denoisers (ComfyUI-GGUF): every quantized layer keeps its own type, under the names of diffusers."""

from pathlib import Path

import pytest
from support import single_file_parts as parts
from support import single_files as whole
from support.cli_runs import answer, assumes, refused, weights
from support.gguf_files import gguf

BLOCKS = ("blocks.", "layers.", "block.")
LITTLE = ("--max-sequence-length", "32")


def _file(folder: Path, shapes: whole.Shapes, architecture: str, kind: str, **metadata: object) -> str:
    tensors = {
        name: (
            kind if len(shape) == 2 and any(block in name for block in BLOCKS) and "table" not in name else "F32",
            shape,
        )
        for name, shape in shapes.items()
    }
    head, size = gguf(tensors, {"general.architecture": architecture, **metadata})
    path = folder / "model.gguf"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    return str(path)


@pytest.mark.parametrize(
    ("shapes", "architecture"),
    [
        (whole.flux(2, 2, 256), "flux"),
        (whole.chroma(1, 1, 256, 256), "flux"),
        (whole.flux2(1, 1, 256, 256), "flux"),
        (whole.qwen_image(2, 256), "qwen_image"),
        (whole.ltx(2, 1024), "ltxv"),
        (whole.z_image(2), "lumina2"),
        (parts.unet((320, 640), (1, 1), text=768), "sd1"),
    ],
)
def test_every_quantized_layer_is_found(tmp_path: Path, shapes: whole.Shapes, architecture: str) -> None:
    kind = "Q8_0"
    path = _file(tmp_path, shapes, architecture, kind)
    found = answer("from-file", path, "--mode", "inference", "--resolution", "256", *LITTLE)
    assert assumes(found, "GGUF", kind, "stay packed")
    packed = {name: shape for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")}
    packed = {name: shape for name, shape in packed.items() if any(block in name for block in BLOCKS)}
    total = sum(_count(shape) for shape in shapes.values())
    wide = total - sum(_count(shape) for shape in packed.values())
    stored = sum(_count(shape) * 34 // 32 for shape in packed.values())
    assert weights(found) == pytest.approx(stored + 2 * wide, rel=0.02)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def test_a_published_file_has_its_published_size(tmp_path: Path) -> None:
    """flux1-dev-Q8_0.gguf of city96 is 12.7 GB."""
    found = answer("from-file", _file(tmp_path, whole.flux(), "flux", "Q8_0"), "--mode", "inference")
    assert weights(found) == pytest.approx(12.7e9, rel=0.003)


def test_shapes_before_conversion_are_those_that_count(tmp_path: Path) -> None:
    shapes = whole.wan(256, 1, 512)
    shape = shapes["patch_embedding.weight"]
    shapes |= {"patch_embedding.weight": (shape[0], shape[1] * 4)}
    noted = {"comfy.gguf.orig_shape.patch_embedding.weight": list(shape)}
    path = _file(tmp_path, shapes, "wan", "Q8_0", **noted)
    found = answer("from-file", path, "--mode", "inference", "--resolution", "256", "--num-frames", "1")
    assert found["model"]["family"] == "WanTransformer3DModel"


def test_training_unpacks_them(tmp_path: Path) -> None:
    path = _file(tmp_path, whole.flux(1, 1, 256), "flux", "Q4_K")
    found = answer("from-file", path, "--lora-rank", "4", "--resolution", "256")
    assert assumes(found, "unpacked to 16 bits for training")


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    assert "IQ2_XS" in refused(1, "from-file", _file(tmp_path, whole.flux(1, 1, 256), "flux", "IQ2_XS"))
    path = _file(tmp_path, whole.flux(1, 1, 256), "flux", "Q4_K")
    assert "quantized already" in refused(2, "from-file", path, "--mode", "inference", "--quantization", "nf4")
