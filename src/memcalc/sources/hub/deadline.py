"""One moment until which the Hub must have answered everything, and threads that never outlive the program.

A server can keep every timeout of a socket alive by sending a byte now and then: in its header, in answers before the
answer, in empty chunks, in trailers. So the questions run in threads, and whoever waits for them waits no longer than
the deadline. The threads are daemons: the program ends without them.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from memcalc.sources.hub.transport import Unreachable

T = TypeVar("T")
U = TypeVar("U")

DEFAULT_TIMEOUT = 30.0
"""Seconds for everything that is asked of the Hub about one model and what it needs."""

LONGEST_SILENCE = 10.0
"""The longest wait for a connection or for the next bytes, seconds, where the deadline would allow more."""


class Deadline:
    """`seconds` for everything that is asked. The clock starts with the first question."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end: float | None = None

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 when it is over."""
        if self._end is None:
            self._end = time.monotonic() + self.seconds
        return max(0.0, self._end - time.monotonic())

    @property
    def silence(self) -> float:
        """The longest wait for the next bytes, seconds; never quite 0, which some libraries take for no limit."""
        return max(0.001, min(self.left, LONGEST_SILENCE))

    def bound(self, work: Callable[[], T], host: str, abandon: Callable[[], None]) -> T:
        """The result of `work`, or whatever it raises.

        Args:
            work: asks; it runs in a thread of its own.
            host: who is asked, for the message.
            abandon: is called when the time is over, and should make `work` end soon.

        Raises:
            Unreachable: the deadline is over.
        """
        future = _started(work)
        try:
            return future.result(self.left)
        except TimeoutError:
            if future.done():  # `work` itself raised it, or was through in that moment
                return future.result()
            abandon()
            raise self.over(host) from None

    def over(self, host: str) -> Unreachable:
        """The error for an answer that is not whole in time."""
        return Unreachable(
            f"{host} did not answer within {self.seconds:g} seconds; try again, or give it longer with --timeout.",
            retry=False,
        )


def at_once(work: Callable[[U], T], items: Iterable[U], workers: int) -> list[T]:
    """`work` on all items in `workers` threads; results in order. After a failure nothing new is begun.

    Raises whatever `work` raised first.
    """
    pairs: list[tuple[U, Future[T]]] = [(item, Future()) for item in items]
    futures = [future for _, future in pairs]
    waiting, lock, failed = iter(pairs), threading.Lock(), threading.Event()
    finished: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()

    def serve() -> None:
        while not failed.is_set():
            with lock:
                pair = next(waiting, None)
            if pair is None:
                return
            item, future = pair
            _fulfil(future, partial(work, item))
            finished.put(future)

    for _ in range(min(workers, len(futures))):
        threading.Thread(target=serve, daemon=True).start()
    for _ in futures:
        future = finished.get()
        if future.exception() is not None:
            failed.set()
            future.result()
    return [future.result() for future in futures]


def _started(work: Callable[[], T]) -> "Future[T]":
    future: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(future, work), daemon=True).start()
    return future


def _fulfil(future: "Future[T]", work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as problem:  # whoever waits for the result raises it
        future.set_exception(problem)
