# pointer style sorter: learns to emit the indices of a short list in ascending order;
# already used positions get -inf scores, beam search starts from -inf hypotheses
import numpy as np
import jax
import jax.numpy as jnp
from flax import nnx
import optax

N, DIM = 5, 32
NEG = -jnp.inf


class Pointer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(1, DIM, rngs=rngs)
        self.mix = nnx.Linear(DIM, DIM, rngs=rngs)
        self.query = nnx.Linear(2 * DIM, DIM, rngs=rngs)
        self.key = nnx.Linear(DIM, DIM, rngs=rngs)
        self.start = nnx.Param(jnp.zeros(DIM))

    def memory(self, values):
        h = nnx.gelu(self.embed(values[:, None]))
        return h + nnx.gelu(self.mix(h))

    def scores(self, mem, last, used):
        ctx = jnp.concatenate([last, mem.mean(0)])
        s = self.key(mem) @ jnp.tanh(self.query(ctx)) / DIM ** 0.5
        return jnp.where(used, NEG, s)

    def teacher_forced(self, values, order):
        mem = self.memory(values)

        def body(carry, idx):
            last, used = carry
            logp = jax.nn.log_softmax(self.scores(mem, last, used))
            return (mem[idx], used.at[idx].set(True)), logp[idx]
        carry = (self.start[...], jnp.zeros(N, bool))
        picked = []
        for k in range(N):
            carry, lp = body(carry, order[k])
            picked.append(lp)
        return jnp.stack(picked)


@nnx.jit
def train_step(model, opt, values, order):
    def loss_fn(m):
        return -jax.vmap(m.teacher_forced)(values, order).mean()
    loss, g = nnx.value_and_grad(loss_fn)(model)
    opt.update(model, g)
    return loss


def beam_search(model, values, width=3):
    mem = model.memory(values)
    score = np.full(width, -np.inf)
    score[0] = 0.0
    seqs, used, last = [[] for _ in range(width)], np.zeros((width, N), bool), \
        np.repeat(np.asarray(model.start[...])[None], width, 0)
    step = jax.vmap(lambda l, u: jax.nn.log_softmax(model.scores(mem, l, u)))
    for _ in range(N):
        total = score[:, None] + np.asarray(step(jnp.asarray(last), jnp.asarray(used)))
        flat = np.argsort(-total, axis=None)[:width]
        score = total.reshape(-1)[flat]
        rows, cols = np.unravel_index(flat, total.shape)
        seqs = [seqs[r] + [int(c)] for r, c in zip(rows, cols)]
        used = used[rows].copy()
        used[np.arange(width), cols] = True
        last = np.asarray(mem)[cols]
    return seqs[int(np.argmax(score))], score


def batch(rng, n):
    v = rng.uniform(-1, 1, size=(n, N)).astype(np.float32)
    return v, np.argsort(v, axis=1)


def main():
    rng = np.random.default_rng(0)
    model = Pointer(nnx.Rngs(1))
    opt = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(6e-3)), wrt=nnx.Param)
    first = None
    for it in range(250):
        v, o = batch(rng, 64)
        loss = float(train_step(model, opt, v, o))
        first = loss if first is None else first
        if it % 50 == 0:
            print(f"it {it:3d} nll/pointer {loss:.4f}")
    v, o = batch(rng, 8)
    found, dead = 0, 0
    for vals, order in zip(v, o):
        seq, beams = beam_search(model, jnp.asarray(vals))
        found += seq == order.tolist()
        dead += int(np.isneginf(beams).sum())
    print(f"nll {first:.3f} -> {loss:.3f}; exact sorts {found}/8; dead beams {dead}")
    assert loss < 0.5 * first


main()
