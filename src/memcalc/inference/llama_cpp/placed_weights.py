"""Where llama.cpp's weights lie: on the GPU or on the host, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from memcalc.inference.served_model import ServedModel
from memcalc.models.spec import ModelSpec
from memcalc.nn.model import Network


@dataclass(frozen=True)
class Placement:
    """Which of `depth` layers are on the GPU: the last, of which the output layer counts as one."""

    depth: int
    layers: int
    experts_on_host: int

    @property
    def first(self) -> int:
        """The first layer on the GPU."""
        return max(0, self.depth + 1 - self.layers)

    @property
    def layers_on_gpu(self) -> int:
        """How many layers are on the GPU, the output layer not counted."""
        return self.depth - self.first if self.layers else 0

    def share(self, place: str) -> float:
        """Which part of the weights of a place is on the GPU."""
        kind, _, number = place.partition(" ")
        if kind in ("embedding", "input") or not self.layers:
            return 0.0
        first = max(self.first, self.experts_on_host) if kind == "experts" else self.first
        if kind in ("layer", "experts") and number:
            return float(int(number) >= first)
        return (self.depth - min(first, self.depth)) / max(self.depth, 1) if kind in ("layer", "experts") else 1.0

    def weights(self, spec: ModelSpec, model: ServedModel) -> PlacedWeights:
        """Where the weights of a model lie."""
        here: Counter[str] = Counter()
        host = 0
        places = _places(spec, model)
        for (place, label), nbytes in places.items():
            share = round(nbytes * self.share(place))
            here[label] += share
            host += nbytes - share
        output = sum(nbytes for (place, _), nbytes in places.items() if place == "head")
        if not output:  # tied: the output layer has a copy of its own
            for (place, label), nbytes in places.items():
                output += nbytes if place == "embedding" else 0
                here[f"{label}, as output"] += nbytes if place == "embedding" and self.layers else 0
        blocks = {place: n for (place, _), n in places.items() if place.split()[0] in ("layer", "experts")}
        away = any(self.share(place) < 1 for place in blocks)
        total = sum(n for (place, _), n in places.items() if place.split()[0] in ("layer", "experts"))
        return PlacedWeights(+here, host, output, _largest_matrix(model.network, total) if away else 0)


@dataclass(frozen=True)
class PlacedWeights:
    """Bytes of weights on the GPU by what they are, on the host, of the output layer, of the largest matrix away."""

    here: Mapping[str, int]
    host: int
    output: int
    largest_on_host: int


def _largest_matrix(network: Network, block_bytes: int) -> int:
    """Bytes of the largest matrix of a block, where all blocks take `block_bytes`; experts count one by one."""
    blocks = [p for _, p in network.parameters() if p.group not in ("embedding", "LM head")]
    elements = sum(p.numel * p.copies for p in blocks)
    largest = max((p.numel for p in blocks if len(p.shape) > 1), default=0)
    return round(largest * block_bytes / max(elements, 1))


def _places(spec: ModelSpec, model: ServedModel) -> dict[tuple[str, str], int]:
    """Bytes of weights by place and label: as a GGUF file has them, else by what the network's weights are."""
    if spec.stored is not None and spec.stored.places:
        return dict(spec.stored.places)
    parts: dict[tuple[str, str], int] = {}
    for label, nbytes in (model.weights.parts or {}).items():
        if label.endswith(" embedding"):
            place = "embedding"
        elif label.endswith(("LM head", " head")):
            place = "head"
        elif label.endswith(" experts"):
            place = "experts"
        else:
            place = "layer"
        parts[place, label] = parts.get((place, label), 0) + nbytes
    return parts
