"""Tiny speech enhancer: predicts a per-band gain for every frame and is trained on
power + phase of the short-time spectrum."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

FRAME = 64
HOP = 64


def make_clip(rng, n_frames=24):
    t = np.arange(n_frames * HOP)
    f0 = rng.uniform(0.02, 0.08)
    clean = np.sin(2 * np.pi * f0 * t) + 0.4 * np.sin(4 * np.pi * f0 * t + 0.3)
    noisy = clean + 0.3 * rng.standard_normal(t.shape)
    # clips have different durations; the rest of the buffer stays empty
    end = int(rng.integers(14, n_frames + 1)) * HOP
    clean[end:] = 0.0
    noisy[end:] = 0.0
    return noisy.astype(np.float32), clean.astype(np.float32)


def frames(x):
    return x.reshape(-1, FRAME)


def init(key):
    k1, k2 = jax.random.split(key)
    nb = FRAME // 2 + 1
    return {
        "w1": jax.random.normal(k1, (nb, 32)) * 0.1,
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(k2, (32, nb)) * 0.1,
        "b2": jnp.zeros(nb),
    }


def enhance(params, noisy):
    spec = jnp.fft.rfft(frames(noisy), axis=-1)
    feat = jnp.log1p(spec.real**2 + spec.imag**2)
    h = jnp.tanh(feat @ params["w1"] + params["b1"])
    gain = jax.nn.sigmoid(h @ params["w2"] + params["b2"])
    return jnp.fft.irfft(spec * gain, n=FRAME, axis=-1)


def loss_fn(params, noisy, clean):
    est = enhance(params, noisy)
    ref = frames(clean)
    E = jnp.fft.rfft(est, axis=-1)
    R = jnp.fft.rfft(ref, axis=-1)
    pow_e = E.real**2 + E.imag**2
    pow_r = R.real**2 + R.imag**2
    phase_e = jnp.angle(E)
    phase_r = jnp.angle(R)
    l_pow = jnp.mean((jnp.log1p(pow_e) - jnp.log1p(pow_r)) ** 2)
    l_phase = jnp.mean(1.0 - jnp.cos(phase_e - phase_r))
    return l_pow + 0.1 * l_phase


rng = np.random.default_rng(4)
clips = [make_clip(rng) for _ in range(12)]
params = init(jax.random.PRNGKey(0))
opt = optax.adam(3e-3)
state = opt.init(params)

grad_fn = jax.jit(jax.value_and_grad(loss_fn))
for it in range(60):
    noisy, clean = clips[it % len(clips)]
    loss, g = grad_fn(params, noisy, clean)
    upd, state = opt.update(g, state)
    params = optax.apply_updates(params, upd)
    if it % 5 == 0 or it < 5:
        print(f"iter {it:3d}  loss {float(loss):.4f}  |g| {float(optax.global_norm(g)):.4f}")
