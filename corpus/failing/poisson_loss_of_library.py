"""The library's Poisson loss of a log-rate of 100."""

from corpus.case import Case, program


def in_torch():
    import torch
    from torch.nn import functional

    def loss(log_rate, y):
        return functional.poisson_nll_loss(log_rate, y)  # BAD

    return program(loss, torch.tensor([1.0, 100.0], requires_grad=True), torch.tensor([2.0, 3.0]))


CASE = Case(
    cause="overflow", operation=("exp", "poisson_nll"), only="torch", because="optax has no Poisson loss"
)
