"""An allocation under linear constraints: Newton's method on a log barrier, with backtracking outside of its domain."""
import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)


def problem(key, n=20, m=30):
    k1, k2, k3, k4 = jax.random.split(key, 4)
    q = jax.random.normal(k1, (n, n)) / n**0.5
    return (q @ q.T + 0.1 * jnp.eye(n), 3 * jax.random.normal(k2, (n,)),
            jax.random.normal(k3, (m, n)) / n**0.5, 1 + jax.random.uniform(k4, (m,)))


def objective(x, q, c):
    return 0.5 * x @ q @ x + c @ x


def merit(x, t, q, c, a, b):
    slack = b - a @ x
    inside = (slack > 0).all()
    barrier = -jnp.log(jnp.where(inside, slack, 1.0)).sum()
    return jnp.where(inside, t * objective(x, q, c) + barrier, jnp.inf)


@jax.jit
def newton(x, t, q, c, a, b):
    value, grad = jax.value_and_grad(merit)(x, t, q, c, a, b)
    hessian = jax.hessian(merit)(x, t, q, c, a, b)
    direction = -jnp.linalg.solve(hessian, grad)
    slope = grad @ direction

    def too_far(carry):
        size, _ = carry
        return ~(merit(x + size * direction, t, q, c, a, b) <= value + 0.1 * size * slope)

    size, rejected = jax.lax.while_loop(too_far, lambda s: (s[0] / 2, s[1] + 1), (1.0, 0))
    return x + size * direction, -slope, rejected


def minimise(x, t, *rest, most=60, tolerance=1e-7):
    total = 0
    for _ in range(most):
        new, decrement, rejected = newton(x, t, *rest)
        if decrement < tolerance:
            break
        x, total = new, total + int(rejected)
    return x, total


def main():
    q, c, a, b = problem(jax.random.key(0))
    x, t = jnp.zeros(len(c)), 1.0
    while len(b) / t > 1e-8:
        x, rejected = minimise(x, t, q, c, a, b)
        print(f"t {t:9.1e} objective {float(objective(x, q, c)):.6f} gap {len(b) / t:.1e} rejected {rejected}")
        t *= 8
    duals = 1 / (t / 8 * (b - a @ x))
    stationarity = jnp.linalg.norm(q @ x + c + a.T @ duals)
    print(f"KKT residual {float(stationarity):.2e} least slack {float((b - a @ x).min()):.1e}")


if __name__ == "__main__":
    main()
