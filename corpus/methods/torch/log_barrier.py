"""An allocation under linear constraints: Newton's method on a log barrier, with backtracking outside of its domain."""
import torch


def problem(n=20, m=30):
    a = torch.randn(m, n) / n**0.5
    b = 1 + torch.rand(m)
    q = torch.randn(n, n) / n**0.5
    return q @ q.T + 0.1 * torch.eye(n), torch.randn(n), a, b


def objective(x, q, c):
    return 0.5 * x @ q @ x + c @ x


def barrier(x, a, b):
    slack = b - a @ x
    if (slack <= 0).any():
        return torch.tensor(float("inf"), dtype=x.dtype)
    return -slack.log().sum()


def minimise(x, t, q, c, a, b, most=60, tolerance=1e-7):
    """Damped Newton steps on t * objective + barrier."""
    rejected = 0
    for _ in range(most):
        x = x.detach().requires_grad_()
        value = t * objective(x, q, c) + barrier(x, a, b)
        (grad,) = torch.autograd.grad(value, x)
        slack = b - a @ x.detach()
        hessian = t * q + a.T @ torch.diag(slack**-2) @ a
        direction = -torch.linalg.solve(hessian, grad)
        decrement = -(grad @ direction)
        if decrement < tolerance:
            break
        size = 1.0
        with torch.no_grad():
            while True:
                new = x + size * direction
                tried = t * objective(new, q, c) + barrier(new, a, b)
                if tried <= value + 0.1 * size * (grad @ direction):
                    break
                rejected += 1
                size *= 0.5
        x = new
    return x.detach(), rejected


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    q, c, a, b = problem()
    c = 3 * c
    x, t = torch.zeros(len(c)), 1.0
    while len(b) / t > 1e-8:
        x, rejected = minimise(x, t, q, c, a, b)
        print(f"t {t:9.1e} objective {objective(x, q, c):.6f} gap {len(b) / t:.1e} rejected {rejected}")
        t *= 8
    duals = 1 / (t / 8 * (b - a @ x))
    stationarity = (q @ x + c + a.T @ duals).norm()
    print(f"KKT residual {stationarity:.2e} least slack {(b - a @ x).min():.1e}")


if __name__ == "__main__":
    main()
