from torch import cuda


def backward(peak=0, inside=None):
    cuda.use(peak)
    if inside is not None:
        from torch import autograd

        autograd.backward(inside)
