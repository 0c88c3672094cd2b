"""The library's attention module: all keys of one item of the batch are padding."""

from corpus.case import Case, program


def in_torch():
    import torch

    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)

    def loss(x, padding):
        out, _ = attention(x, x, x, key_padding_mask=padding)  # BAD
        return out.square().mean()

    padding = torch.tensor([[False, False, True], [True, True, True]])
    return program(loss, torch.randn(2, 3, 4), padding, model=attention)


CASE = Case(cause="mask", operation=("softmax", "attention"), only="torch", because="no such module in JAX")
