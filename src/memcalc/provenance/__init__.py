"""Where each tensor of a step comes from, and why it is alive: the run is traced again with a recorder."""
