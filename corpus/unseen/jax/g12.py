"""Speech denoising by a learned spectral filter (magnitude and phase terms)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

FRAME, HOP, CLIP = 64, 32, 1024
WINDOW = jnp.hanning(FRAME)


def stft(wave):
    starts = jnp.arange(0, CLIP - FRAME + 1, HOP)
    frames = wave[:, starts[:, None] + jnp.arange(FRAME)[None]]
    return jnp.fft.rfft(frames * WINDOW)


def synth(rng, n=16):
    """Clips of different duration, zero padded to CLIP samples."""
    t = np.arange(CLIP) / 1000.0
    f0 = rng.uniform(60, 250, (n, 1))
    clean = np.sin(2 * np.pi * f0 * t) + 0.4 * np.sin(4 * np.pi * f0 * t)
    noisy = clean + 0.3 * rng.normal(size=clean.shape)
    duration = rng.integers(CLIP // 2, CLIP, (n, 1))
    alive = np.arange(CLIP) < duration
    return (np.float32(noisy * alive), np.float32(clean * alive))


def init(key, bins=FRAME // 2 + 1, hidden=32):
    a, b = jax.random.split(key)
    return {
        "in": jax.random.normal(a, (bins, hidden)) / np.sqrt(bins),
        "b_in": jnp.zeros(hidden),
        "out": jax.random.normal(b, (hidden, 2 * bins)) * 0.1,
        "b_out": jnp.zeros(2 * bins).at[:bins].set(1.0),
    }


def enhance(p, spec):
    power = jnp.log1p(spec.real**2 + spec.imag**2)
    h = jnp.tanh(power @ p["in"] + p["b_in"])
    re, im = jnp.split(h @ p["out"] + p["b_out"], 2, axis=-1)
    return spec * jax.lax.complex(re, im)


def loss_fn(p, noisy, clean):
    est, ref = enhance(p, stft(noisy)), stft(clean)
    diff = est - ref
    magnitude = jnp.mean(diff.real**2 + diff.imag**2)
    phase_est = jnp.arctan2(est.imag, est.real)
    phase_ref = jnp.arctan2(ref.imag, ref.real)
    phase = jnp.mean(1.0 - jnp.cos(phase_est - phase_ref))
    return magnitude + 0.1 * phase


params = init(jax.random.PRNGKey(2))
opt = optax.adam(2e-3)
opt_state = opt.init(params)
grad_fn = jax.jit(jax.value_and_grad(loss_fn))
rng = np.random.default_rng(6)
for it in range(120):
    value, grads = grad_fn(params, *synth(rng))
    updates, opt_state = opt.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    if it % 15 == 0:
        print("iteration", it, "loss", float(value))
