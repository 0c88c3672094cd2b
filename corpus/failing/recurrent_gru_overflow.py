"""A GRU with NaN in its recurrent weights."""

from corpus.case import Case, program


def in_torch():
    import torch

    torch.manual_seed(0)
    gru = torch.nn.GRU(2, 3)
    gru.weight_hh_l0.data[0, 0] = float("nan")

    def loss(x):
        out, _ = gru(x)  # BAD
        return out.square().mean()

    return program(loss, torch.ones(4, 1, 2), model=gru)


CASE = Case(cause="parameters", operation="parameter", only="torch", because="no such module in JAX")
