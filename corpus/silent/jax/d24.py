import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class ConvAutoencoder(eqx.Module):
    enc1: eqx.nn.Conv2d
    enc2: eqx.nn.Conv2d
    dec1: eqx.nn.ConvTranspose2d
    dec2: eqx.nn.ConvTranspose2d

    def __init__(self, key):
        k = jax.random.split(key, 4)
        self.enc1 = eqx.nn.Conv2d(1, 12, 3, stride=2, padding=1, key=k[0])
        self.enc2 = eqx.nn.Conv2d(12, 16, 3, stride=2, padding=1, key=k[1])
        self.dec1 = eqx.nn.ConvTranspose2d(16, 12, 4, stride=2, padding=1, key=k[2])
        self.dec2 = eqx.nn.ConvTranspose2d(12, 1, 4, stride=2, padding=1, key=k[3])

    def __call__(self, x):
        h = jax.nn.relu(self.enc1(x))
        h = jax.nn.relu(self.enc2(h))
        h = jax.nn.relu(self.dec1(h))
        return self.dec2(h)


def reconstruction_loss(model, x):
    recon = jax.vmap(model)(x)
    return jnp.sum((recon - x) ** 2)


class Experiment:
    max_norm = 1.0
    lr = 2e-5
    momentum = 0.9

    def __init__(self, seed=0):
        self.model = ConvAutoencoder(jax.random.PRNGKey(seed))
        self.tx = optax.chain(
            optax.clip_by_global_norm(self.max_norm),
            optax.sgd(self.lr, momentum=self.momentum),
        )
        self.state = self.tx.init(eqx.filter(self.model, eqx.is_array))
        self.rng = np.random.default_rng(seed)

    def build_step(self):
        tx = self.tx

        @eqx.filter_jit
        def step(model, state, x):
            loss, grads = eqx.filter_value_and_grad(reconstruction_loss)(model, x)
            updates, state = tx.update(grads, state)
            return eqx.apply_updates(model, updates), state, loss

        return step

    def run(self, data, steps=400, batch=64):
        step = self.build_step()
        for i in range(steps):
            x = data[self.rng.integers(0, len(data), batch)]
            self.model, self.state, loss = step(self.model, self.state, x)
            if i % 40 == 0:
                print(f"step {i:3d}: loss per image {float(loss) / batch:.4f}")

    def mse(self, data):
        return float(reconstruction_loss(self.model, jnp.asarray(data))) / data.size


if __name__ == "__main__":
    images = load_digits().images[:, None].astype(np.float32) / 16.0
    exp = Experiment()
    exp.run(images[:1500])
    print("test mse", exp.mse(images[1500:]), "image variance", float(images[1500:].var()))
