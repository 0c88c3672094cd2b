import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, LEN, DIM, BETA = 20, 14, 32, 0.1
rng = np.random.default_rng(2)
trans = rng.dirichlet(np.ones(VOCAB) * 0.4, size=VOCAB)
cum = trans.cumsum(-1)
polite, rude = 3, 17


def write(n, good):
    """Answers are similar chains; the bad ones contain some rude tokens, the good ones some polite ones."""
    seq = np.zeros((n, LEN), dtype=np.int64)
    seq[:, 0] = rng.integers(0, VOCAB, n)
    for t in range(1, LEN):
        seq[:, t] = (rng.random((n, 1)) > cum[seq[:, t - 1]]).sum(-1).clip(0, VOCAB - 1)
        style = rng.random(n) < 0.15
        token = np.where(rng.random(n) < (0.8 if good else 0.2), polite, rude)
        seq[:, t] = np.where(style, token, seq[:, t])
    return seq


def pair(n):
    chosen, rejected = write(n, True), write(n, False)
    half = LEN // 3
    rejected[:, :half] = chosen[:, :half]
    return jnp.asarray(chosen), jnp.asarray(rejected)


class Net(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, DIM)(ids)
        x = x + self.param("pos", nn.initializers.normal(0.02), (LEN, DIM))[: ids.shape[1]]
        mask = nn.make_causal_mask(ids)
        for _ in range(1):
            x = x + nn.SelfAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(DIM)(nn.gelu(nn.Dense(3 * DIM)(nn.LayerNorm()(x))))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


net = Net()


def logp(params, seq):
    lp = jax.nn.log_softmax(net.apply(params, seq[:, :-1]))
    return jnp.take_along_axis(lp, seq[:, 1:, None], -1)[..., 0].sum(-1)


params = net.init(jax.random.PRNGKey(0), jnp.zeros((1, LEN - 1), jnp.int32))
sft_opt, dpo_opt = optax.adam(3e-3), optax.adam(2e-4)


@jax.jit
def sft_step(params, state, seq):
    loss, g = jax.value_and_grad(lambda p: -logp(p, seq).mean() / (LEN - 1))(params)
    u, state = sft_opt.update(g, state)
    return optax.apply_updates(params, u), state, loss


def dpo_loss(params, ref, chosen, rejected):
    rc = BETA * (logp(params, chosen) - logp(ref, chosen))
    rr = BETA * (logp(params, rejected) - logp(ref, rejected))
    return -jax.nn.log_sigmoid(rc - rr).mean(), (rc.mean(), rr.mean(), (rc > rr).mean())


@jax.jit
def dpo_step(params, state, ref, chosen, rejected):
    (loss, aux), g = jax.value_and_grad(dpo_loss, has_aux=True)(params, ref, chosen, rejected)
    u, state = dpo_opt.update(g, state)
    return optax.apply_updates(params, u), state, loss, aux


state = sft_opt.init(params)
for step in range(120):
    params, state, loss = sft_step(params, state, pair(48)[0])
    if step % 40 == 0:
        print("sft", step, float(loss))
ref = params
test = pair(1000)
state = dpo_opt.init(params)
for step in range(150):
    params, state, loss, (rc, rr, acc) = dpo_step(params, state, ref, *pair(48))
    if step % 25 == 0:
        print(f"dpo {step} loss {float(loss):.4f} rewards/chosen {float(rc):.3f} rewards/rejected {float(rr):.3f} acc {float(acc):.2f}")

_, (rc, rr, acc) = dpo_loss(params, ref, *test)
print("test rewards", float(rc), float(rr), "logp chosen", float(logp(ref, test[0]).mean()), "->", float(logp(params, test[0]).mean()))
print("FINAL", 1.0 - float(acc))
