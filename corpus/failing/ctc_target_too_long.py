"""CTC of a target that is longer than the input: no path, and the loss is inf."""

from corpus.case import Case, program


def in_torch():
    import torch
    from torch.nn import functional

    def loss(logits, target):
        logp = torch.log_softmax(logits, dim=-1)
        lengths = torch.tensor([2]), torch.tensor([3])
        return functional.ctc_loss(logp, target, *lengths)  # BAD

    return program(loss, torch.zeros(2, 1, 4, requires_grad=True), torch.tensor([[1, 2, 3]]))


CASE = Case(
    cause=("labels", "domain"),
    operation="ctc_loss",
    only="torch",
    because="optax's CTC uses a large finite number for log 0",
)
