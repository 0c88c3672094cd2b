"""A sequence model that reverses its input, evaluated with beam search between the epochs."""
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, BOS, EOS, PAD, LENGTH = 13, 10, 11, 12, 5


class Seq2Seq(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(2 * dim, VOCAB)

    def encode(self, src):
        return self.encoder(self.embed(src))

    def decode(self, tokens, memory, state, mask):
        h, state = self.decoder(self.embed(tokens), state)
        scores = (h @ memory.transpose(1, 2)).masked_fill(mask[:, None], float("-inf"))
        context = scores.softmax(-1) @ memory
        return self.out(torch.cat([h, context], -1)), state


def batch(n):
    length = torch.randint(3, LENGTH + 1, (n,))
    src = torch.full((n, LENGTH), PAD)
    tgt = torch.full((n, LENGTH + 1), PAD)
    for i, k in enumerate(length.tolist()):
        row = torch.randint(0, 10, (k,))
        src[i, :k], tgt[i, :k], tgt[i, k] = row, row.flip(0), EOS
    return src, tgt


@torch.no_grad()
def beam_search(model, src, width=4):
    memory, state = model.encode(src[None])
    memory, state = memory.expand(width, -1, -1), state.expand(-1, width, -1).contiguous()
    mask = (src == PAD).expand(width, -1)
    scores = torch.full((width,), float("-inf"))
    scores[0] = 0.0
    beams, done = torch.full((width, 1), BOS), torch.zeros(width, dtype=torch.bool)
    for _ in range(LENGTH + 1):
        logits, state = model.decode(beams[:, -1:], memory, state, mask)
        logp = logits[:, 0].log_softmax(-1)
        logp[:, [BOS, PAD]] = float("-inf")
        logp[done] = float("-inf")
        logp[done, EOS] = 0.0
        best, index = (scores[:, None] + logp).flatten().topk(width)
        source, token = index // VOCAB, index % VOCAB
        beams = torch.cat([beams[source], token[:, None]], 1)
        state, done, scores = state[:, source].contiguous(), done[source] | (token == EOS), best
    return beams[scores.argmax(), 1:]


def exact_match(model, n=40):
    src, tgt = batch(n)
    right = 0
    for s, t in zip(src, tgt):
        found = beam_search(model, s)
        k = int((t == EOS).nonzero()[0]) + 1
        right += bool((found[:k] == t[:k]).all())
    return right / n


def main(epochs=6, steps=100):
    torch.manual_seed(0)
    model = Seq2Seq()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for _ in range(steps):
            src, tgt = batch(64)
            memory, state = model.encode(src)
            start = torch.full((len(tgt), 1), BOS)
            logits, _ = model.decode(torch.cat([start, tgt[:, :-1]], 1), memory, state, src == PAD)
            loss = F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), ignore_index=PAD)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f} exact match {exact_match(model):.2f}")


if __name__ == "__main__":
    main()
