from torch.optim import optimizer
from torch.optim.optimizer import Optimizer
