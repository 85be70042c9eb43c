from torch import cuda

_before, _after = [], []


def register_optimizer_step_pre_hook(hook):
    _before.append(hook)


def register_optimizer_step_post_hook(hook):
    _after.append(hook)


class Optimizer:
    def step(self, peak):
        for hook in _before:
            hook(self, (), {})
        cuda.use(peak)
        for hook in _after:
            hook(self, (), {})
