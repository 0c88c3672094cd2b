"""A VQ-VAE on digits: a codebook that follows the encoder by an average, and a straight-through gradient."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

CODES, DIM = 64, 16


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.Conv(32, (4, 4), strides=2)(x))
        return nn.Conv(DIM, (1, 1))(x)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, q):
        x = nn.relu(nn.Conv(32, (3, 3))(q))
        x = nn.relu(nn.ConvTranspose(32, (4, 4), strides=(2, 2))(x))
        return nn.Conv(1, (3, 3))(x)


encoder, decoder = Encoder(), Decoder()


def nearest(codebook, z):
    flat = z.reshape(-1, DIM)
    distance = (flat**2).sum(1)[:, None] - 2 * flat @ codebook["embed"].T + (codebook["embed"] ** 2).sum(1)
    index = distance.argmin(1)
    return flat, index, codebook["embed"][index].reshape(z.shape)


def follow(codebook, flat, index, key, decay=0.95):
    hot = jax.nn.one_hot(index, CODES)
    count = decay * codebook["count"] + (1 - decay) * hot.sum(0)
    total = decay * codebook["total"] + (1 - decay) * hot.T @ flat
    fresh = flat[jax.random.randint(key, (CODES,), 0, len(flat))]
    dead = count < 0.05
    count, total = jnp.where(dead, 1.0, count), jnp.where(dead[:, None], fresh, total)
    return {"embed": total / count[:, None], "count": count, "total": total}


def loss_fn(params, codebook, x):
    z = encoder.apply(params["encoder"], x)
    flat, index, q = nearest(codebook, jax.lax.stop_gradient(z))
    out = decoder.apply(params["decoder"], z + jax.lax.stop_gradient(q - z))
    mse, commitment = jnp.mean((out - x) ** 2), jnp.mean((z - q) ** 2)
    return mse + 0.25 * commitment, (flat, index, mse, commitment)


def main(steps=300):
    images = jnp.asarray(load_digits().images, jnp.float32)[..., None] / 16
    train, test = images[:1500], images[1500:]
    a, b, c, key = jax.random.split(jax.random.key(0), 4)
    params = {"encoder": encoder.init(a, train[:1]), "decoder": decoder.init(b, jnp.zeros((1, 4, 4, DIM)))}
    embed = jax.random.normal(c, (CODES, DIM))
    codebook = {"embed": embed, "count": jnp.ones(CODES), "total": embed}
    tx = optax.adam(2e-3)
    state = tx.init(params)

    @jax.jit
    def step(params, codebook, state, key, x):
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, codebook, x)
        updates, state = tx.update(grads, state)
        flat, index, mse, commitment = aux
        return optax.apply_updates(params, updates), follow(codebook, flat, index, key), state, loss, mse, commitment

    for i in range(steps):
        key, ka, kb = jax.random.split(key, 3)
        x = train[jax.random.randint(ka, (64,), 0, len(train))]
        params, codebook, state, loss, mse, commitment = step(params, codebook, state, kb, x)
        if i % 50 == 0:
            print(f"{i:4d} loss {float(loss):.4f} mse {float(mse):.4f} commitment {float(commitment):.4f}")
    _, (_, index, mse, _) = loss_fn(params, codebook, test)
    print(f"test mse {float(mse):.4f} variance {float(test.var()):.4f} codes {len(jnp.unique(index))}")


if __name__ == "__main__":
    main()
