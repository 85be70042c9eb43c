"""Runs inside the user's script: reads PyTorch's memory counters at the edges of each phase of the first steps.

Python imports it before the script (its folder is put on PYTHONPATH). It uses the standard library and the torch that
the script itself imports; it changes no result, and ends the script after the steps that were asked for.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from typing import Any

OUT, STEPS, SNAPSHOT = "MEMCALC_VERIFY_OUT", "MEMCALC_VERIFY_STEPS", "MEMCALC_VERIFY_SNAPSHOT"
WORKSPACES = "MEMCALC_VERIFY_WORKSPACES"
_WATCHED = "torch.optim.optimizer"


class _Meter:
    """The peaks of each phase, step by step, of the process that it lives in."""

    def __init__(self, torch: Any, out: str, steps: int) -> None:
        self.torch, self.out, self.wanted = torch, out, steps
        self.steps: list[dict[str, list[int]]] = []
        self.now: dict[str, list[int]] = {}
        self.depth = 0
        self.written = False

    def close(self, phase: str) -> None:
        """What was the most since the last edge belongs to `phase`."""
        cuda = self.torch.cuda
        if not cuda.is_available() or not cuda.is_initialized():
            return
        cuda.synchronize()
        peaks = [cuda.max_memory_allocated(), cuda.max_memory_reserved()]
        self.now[phase] = [max(pair) for pair in zip(peaks, self.now.get(phase, [0, 0]), strict=True)]
        cuda.reset_peak_memory_stats()

    def before_step(self, *_: Any) -> None:
        """An optimizer is about to step."""
        self.close("backward")

    def after_step(self, *_: Any) -> None:
        """An optimizer has stepped; the last of the steps that were asked for ends the script."""
        self.close("step")
        if not self.now:
            return
        self.steps.append(self.now)
        self.now = {}
        if len(self.steps) == self.wanted - 1:
            self._record()
        if len(self.steps) >= self.wanted:
            self.write()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def backward(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Run torch.autograd.backward between two edges; inside another it is part of that one."""
        if self.depth:
            return run(*args, **kwargs)
        self.close("forward")
        self.depth += 1
        try:
            return run(*args, **kwargs)
        finally:
            self.depth -= 1
            self.close("backward")

    def _record(self) -> None:
        """Have the last step in a memory snapshot."""
        if os.environ.get(SNAPSHOT):
            with suppress(Exception):  # an older torch has it under another name, or not at all
                self.torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")

    def write(self) -> None:
        """Write what was measured, once."""
        if self.written:
            return
        self.written = True
        if (self.now and not self.steps) or not self.steps:
            self.close("whole")
        found = self._facts() | {"steps": self.steps or ([self.now] if self.now else [])}
        if self.steps and os.environ.get(SNAPSHOT):
            with suppress(Exception):
                self.torch.cuda.memory._dump_snapshot(f"{os.environ[SNAPSHOT]}.{os.getpid()}")
        with open(f"{self.out}.{os.getpid()}", "w", encoding="utf-8") as file:
            json.dump(found, file)

    def _facts(self) -> dict[str, Any]:
        cuda = self.torch.cuda
        facts: dict[str, Any] = {
            "torch": str(self.torch.__version__),
            "cuda": str(self.torch.version.cuda),
            "rank": int(os.environ.get("RANK", "0")),
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "pid": os.getpid(),
            "gpu": None,
        }
        if cuda.is_available() and cuda.is_initialized():
            device = cuda.current_device()
            free, total = cuda.mem_get_info()
            facts |= {
                "gpu": cuda.get_device_name(device),
                "total_bytes": total,
                "used_bytes": total - free,
                "reserved_bytes": cuda.memory_reserved(),
                "workspaces": _workspaces(cuda),
                "process_bytes": _asked_of_driver("compute-apps=pid,used_memory", str(os.getpid())),
                "driver": _driver(),
            }
        return facts


def _workspaces(cuda: Any) -> list[int]:
    """Sizes of cuBLAS's workspaces that the allocator holds, told by sizes that nothing else has."""
    known = {int(size) for size in os.environ.get(WORKSPACES, "").split(",") if size}
    return [
        block.get("requested_size", 0)
        for segment in cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block.get("requested_size") in known
    ]


def _asked_of_driver(query: str, pid: str) -> int | None:
    """What nvidia-smi says of this process, in bytes; None where it cannot tell (in a container)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        answer = subprocess.run(
            [tool, f"--query-{query}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        ).stdout
        for line in answer.splitlines():
            owner, _, mebibytes = line.partition(",")
            if owner.strip() == pid:
                return int(mebibytes) * 2**20
    return None


def _driver() -> str | None:
    """The version of the kernel's driver."""
    with suppress(OSError), open("/proc/driver/nvidia/version", encoding="utf-8") as file:
        words = file.readline().split()
        return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)
    return None


def _install(module: Any) -> None:
    """Put the meter around backward and around the optimizers of a torch that is being imported."""
    torch: Any = sys.modules["torch"]
    autograd: Any = sys.modules.get("torch.autograd")
    meter = _Meter(torch, os.environ[OUT], max(int(os.environ.get(STEPS, "3")), 1))
    module.register_optimizer_step_pre_hook(meter.before_step)
    module.register_optimizer_step_post_hook(meter.after_step)
    if autograd is not None:
        run = autograd.backward
        autograd.backward = lambda *args, **kwargs: meter.backward(run, *args, **kwargs)
    atexit.register(meter.write)


class _Watch:
    """An import hook that waits for one module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module as it would be found without this hook, with the meter put on it when it has run."""
        if name != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_install(module: Any) -> None:
                run(module)
                _install(module)

            spec.loader.exec_module = run_and_install  # type: ignore[method-assign]
        return spec


def _run_the_other() -> None:
    """Run the sitecustomize that this one stands in front of."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get(OUT) and __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Watch())
    _run_the_other()
