"""What the cache of a run takes: what grew on the tape, and the pool that an engine keeps beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memcalc.inference.engine_cache import PooledCache, pool_bytes
from memcalc.inference.served_model import ServedModel
from memcalc.nn.kv_cache import Cache


@dataclass(frozen=True)
class KeptCache:
    """The cache of `sequences` sequences of a model that is served."""

    model: ServedModel
    cache: Cache
    sequences: int

    def nbytes(self) -> tuple[int, dict[str, int]]:
        """Bytes of keys and values, and what of the cache stands outside the tape, by name."""
        copies, cache = self._copies(), self.cache
        grown = sum(nbytes * copies[layer] for layer, nbytes in cache.nbytes().items())
        if not isinstance(cache, PooledCache):
            return grown, {}
        pool = sum(nbytes * copies[layer] for layer, nbytes in self._pooled(cache).items())
        states = self._states(cache) * self.sequences
        return grown + pool, {"KV cache": pool, "recurrent states": states}

    def by_card(self) -> dict[int, int]:
        """Bytes of keys and values by the GPU of their layers."""
        copies, cache = self._copies(), self.cache
        held = self._pooled(cache) if isinstance(cache, PooledCache) else cache.nbytes()
        sizes: dict[int, int] = {}
        for layer, nbytes in held.items():
            card = cache.cards.get(layer, 0)
            sizes[card] = sizes.get(card, 0) + nbytes * copies[layer]
        return sizes

    def pool_for(self) -> Callable[[int, int], int] | None:
        """Bytes of the pool for so many sequences of so many tokens; None where there is no pool of pages.

        A layer with a window needs room for it and for the tokens of one pass, in one page more.
        """
        engine, form, cache = self.model.engine, self.model.form, self.cache
        if not isinstance(cache, PooledCache) or engine.cache != "paged":
            return None
        copies = self._copies()
        beyond = (engine.batched_tokens or 0) + engine.page - 1
        widths = [
            (width if width.window is None else replace(width, window=width.window + beyond), copies[layer])
            for layer, width in cache.widths.items()
        ]
        states = self._states(cache)

        def needed(sequences: int, tokens: int) -> int:
            pages = sum(pool_bytes(width, engine, form, sequences, tokens) * count for width, count in widths)
            return pages + states * sequences

        return needed

    def _copies(self) -> dict[int, int]:
        return {id(module): module.copies for _, module in self.model.network.modules()}

    def _pooled(self, cache: PooledCache) -> dict[int, int]:
        engine, form, tokens = self.model.engine, self.model.form, cache.past or cache.length
        return {layer: pool_bytes(width, engine, form, self.sequences, tokens) for layer, width in cache.widths.items()}

    def _states(self, cache: PooledCache) -> int:
        """Bytes of the recurrent states of one sequence."""
        copies = self._copies()
        return sum(sum(sizes.values()) * copies[layer] for layer, sizes in cache.state_bytes.items())
