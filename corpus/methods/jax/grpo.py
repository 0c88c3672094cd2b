"""GRPO on a toy task: the policy has to write the sorted order of three digits, and ends at full reward."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

DIGITS, LENGTH, GROUP, PROMPTS = 6, 3, 16, 12


class Policy(nn.Module):
    dim: int = 64

    @nn.compact
    def __call__(self, prompt, written):
        """Logits of each position, given the tokens before it."""
        start = jnp.full_like(written[:, :1], DIGITS)
        init = nn.initializers.normal(1.0)
        before = nn.Embed(DIGITS + 1, self.dim, embedding_init=init)(jnp.concatenate([start, written[:, :-1]], 1))
        asked = nn.Embed(DIGITS, self.dim, embedding_init=init)(prompt).sum(1, keepdims=True)
        place = nn.Embed(LENGTH, self.dim, embedding_init=init)(jnp.arange(LENGTH))[None]
        h = jnp.concatenate([jnp.broadcast_to(z, before.shape) for z in (asked, before, place)], -1)
        return nn.Dense(DIGITS)(nn.gelu(nn.Dense(128)(h)))


policy = Policy()


@jax.jit
def sample(params, key, prompt):
    written = jnp.zeros_like(prompt)
    for t in range(LENGTH):
        key, sub = jax.random.split(key)
        logits = policy.apply(params, prompt, written)[:, t]
        written = written.at[:, t].set(jax.random.categorical(sub, logits))
    return written


def reward(prompt, written):
    return (written == jnp.sort(prompt, 1)).astype(jnp.float32).mean(1)


def log_prob(params, prompt, written):
    logp = jax.nn.log_softmax(policy.apply(params, prompt, written))
    return jnp.take_along_axis(logp, written[..., None], -1)[..., 0]


def objective(params, prompt, written, old, advantage, clip=0.2):
    ratio = jnp.exp(log_prob(params, prompt, written) - old)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage).mean()


def main(iterations=400):
    key = jax.random.key(0)
    key, sub, init = jax.random.split(key, 3)
    tasks = jnp.stack([jax.random.permutation(k, DIGITS)[:LENGTH] for k in jax.random.split(sub, 24)])
    params = policy.init(init, tasks, jnp.zeros_like(tasks))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))
    state = tx.init(params)

    @jax.jit
    def update(params, state, prompt, written):
        r = reward(prompt, written).reshape(PROMPTS, GROUP)
        advantage = ((r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + 1e-4)).reshape(-1, 1)
        old = log_prob(params, prompt, written)
        loss, grads = jax.value_and_grad(objective)(params, prompt, written, old, advantage)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, r

    for i in range(iterations):
        key, a, b = jax.random.split(key, 3)
        prompt = jnp.repeat(tasks[jax.random.randint(a, (PROMPTS,), 0, len(tasks))], GROUP, 0)
        written = sample(params, b, prompt)
        params, state, loss, r = update(params, state, prompt, written)
        if i % 50 == 0:
            print(f"{i:4d} reward {float(r.mean()):.3f} solved groups {float((r.std(1) == 0).mean()):.2f}")
    done = reward(tasks, sample(params, key, tasks)).mean()
    print(f"final reward {float(done):.3f}")


if __name__ == "__main__":
    main()
