"""What `memcalc verify` asks of torch, with counters that a script sets: no GPU, no tensors."""

from types import SimpleNamespace

from torch import autograd, cuda, optim

__version__ = "2.14.1+fake"
version = SimpleNamespace(cuda="13.0")
