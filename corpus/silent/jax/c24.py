"""Deep ensemble of ReLU students distilled from a fixed teacher: vmap over members, scan over steps."""
import jax
import jax.numpy as jnp
import optax

MEMBERS, STEPS, D_IN, HID = 5, 250, 8, 64


def init_mlp(key, sizes):
    ks = jax.random.split(key, len(sizes) - 1)
    return [(jax.random.normal(k, (a, b)) * jnp.sqrt(2.0 / a), -0.1 * jnp.ones(b))
            for k, a, b in zip(ks, sizes[:-1], sizes[1:])]


def mlp(p, x):
    for w, b in p[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ p[-1][0] + p[-1][1]


teacher = jax.tree.map(jax.lax.stop_gradient, init_mlp(jax.random.PRNGKey(99), [D_IN, 16, 2]))
opt = optax.adam(optax.cosine_decay_schedule(5e-3, STEPS))


def loss_fn(p, x):
    return jnp.mean((mlp(p, x) - mlp(teacher, x)) ** 2)


def train_member(key):
    k0, k1 = jax.random.split(key)
    p = init_mlp(k0, [D_IN, HID, HID, 2])

    def body(carry, k):
        p, s = carry
        x = jax.random.normal(k, (64, D_IN))
        loss, g = jax.value_and_grad(loss_fn)(p, x)
        u, s = opt.update(g, s)
        return (optax.apply_updates(p, u), s), loss

    (p, _), losses = jax.lax.scan(body, (p, opt.init(p)), jax.random.split(k1, STEPS))
    return p, losses


members, losses = jax.jit(jax.vmap(train_member))(jax.random.split(jax.random.PRNGKey(0), MEMBERS))
for t in range(0, STEPS, 50):
    print(t, "loss per member", losses[:, t].round(4))
print("last", losses[:, -1].round(4))

x = jax.random.normal(jax.random.PRNGKey(5), (1000, D_IN))
preds = jax.vmap(mlp, in_axes=(0, None))(members, x)
h = jax.nn.relu(x @ members[0][0][0] + members[0][1][0])
print("inactive hidden units (member 0, layer 1): %.2f" % float((h == 0).mean()))
print("ensemble mse", float(jnp.mean((preds.mean(0) - mlp(teacher, x)) ** 2)),
      "target variance", float(mlp(teacher, x).var()))
