"""A positional table that was filled with NaN by a bug, kept as a buffer."""

from corpus.case import Case, program


def in_torch():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.full((4, 2), float("nan")))
            self.linear = torch.nn.Linear(2, 1)

        def forward(self, x):
            return self.linear(x + self.table[: x.shape[0]])  # BAD

    net = Net()
    return program(lambda x: net(x).sum(), torch.ones(3, 2), model=net)


CASE = Case(cause="parameters", operation="buffer", only="torch", because="JAX has no buffers")
