"""The failing one-liners of the page "NaN-safe functions and losses", as data.

``cures`` evaluates them in both frameworks. In the expressions for torch, ``F`` is ``torch.nn.functional``.
In those for stablenum, ``numerics`` and ``losses`` are the modules of the respective framework.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["THEMES", "Case"]

INF = float("inf")


class Case(NamedTuple):
    """One function at one place.

    Attributes:
        name: of the function in ``numerics`` or ``losses``.
        at: the arguments by name; floating-point ones are cast to the format, others are not.
        torch, jax: what users write: first by hand, then with the framework's own function, if there is one.
        ours: the expression with ``name``, the same in both frameworks.
        by: the argument with respect to which the gradient is shown.
        format: of the floating-point arguments.
    """

    name: str
    at: dict[str, Any]
    torch: tuple[str, ...]
    jax: tuple[str, ...]
    ours: str
    by: str = "x"
    format: str = "float32"


LOGS = (
    Case("log", {"x": 0.0}, ("torch.log(x)",), ("jnp.log(x)",), "numerics.log(x)"),
    Case(
        "log1mexp",
        {"x": 1e-9},
        ("torch.log(1 - torch.exp(-x))",),
        ("jnp.log(1 - jnp.exp(-x))",),
        "numerics.log1mexp(x)",
    ),
    Case(
        "softplus",
        {"x": 100.0},
        ("torch.log(1 + torch.exp(x))", "F.softplus(x)"),
        ("jnp.log(1 + jnp.exp(x))", "jax.nn.softplus(x)"),
        "numerics.softplus(x)",
    ),
    Case(
        "log1pexp",
        {"x": -20.0},
        ("torch.log(1 + torch.exp(x))",),
        ("jnp.log(1 + jnp.exp(x))",),
        "numerics.log1pexp(x)",
    ),
    Case(
        "log_sigmoid",
        {"x": -200.0},
        ("torch.log(torch.sigmoid(x))", "F.logsigmoid(x)"),
        ("jnp.log(jax.nn.sigmoid(x))", "jax.nn.log_sigmoid(x)"),
        "numerics.log_sigmoid(x)",
    ),
    Case(
        "logaddexp",
        {"x": -INF, "y": -INF},
        ("torch.logaddexp(x, y)",),
        ("jnp.logaddexp(x, y)",),
        "numerics.logaddexp(x, y)",
    ),
    Case(
        "logsubexp",
        {"x": 1000.0, "y": 999.0},
        ("torch.log(torch.exp(x) - torch.exp(y))",),
        ("jnp.log(jnp.exp(x) - jnp.exp(y))",),
        "numerics.logsubexp(x, y)",
    ),
    Case(
        "xlogy",
        {"x": 0.0, "y": 0.0},
        ("x * torch.log(y)", "torch.xlogy(x, y)"),
        ("x * jnp.log(y)", "jax.scipy.special.xlogy(x, y)"),
        "numerics.xlogy(x, y)",
        by="y",
    ),
)

SOFTMAX = (
    Case(
        "softmax",
        {"x": [-INF, -INF]},
        ("torch.softmax(x, -1)",),
        ("jax.nn.softmax(x)",),
        "numerics.softmax(x)",
    ),
    Case(
        "softmax",
        {"x": [1.0, 2.0], "keep": [False, False]},
        ("torch.softmax(x.masked_fill(~keep, -torch.inf), -1)",),
        ("jax.nn.softmax(jnp.where(keep, x, -jnp.inf))", "jax.nn.softmax(x, where=keep)"),
        "numerics.softmax(x, mask=keep)",
    ),
    Case(
        "log_softmax",
        {"x": [200.0, 0.0]},
        ("torch.log(torch.softmax(x, -1))", "F.log_softmax(x, -1)"),
        ("jnp.log(jax.nn.softmax(x))", "jax.nn.log_softmax(x)"),
        "numerics.log_softmax(x)",
    ),
    Case(
        "log_softmax",
        {"x": [-INF, -INF]},
        ("F.log_softmax(x, -1)",),
        ("jax.nn.log_softmax(x)",),
        "numerics.log_softmax(x)",
    ),
    Case(
        "logsumexp",
        {"x": [1000.0, 1000.0]},
        ("torch.log(torch.exp(x).sum())", "torch.logsumexp(x, -1)"),
        ("jnp.log(jnp.exp(x).sum())", "jax.nn.logsumexp(x)"),
        "numerics.logsumexp(x)",
    ),
    Case(
        "logsumexp",
        {"x": [-INF, -INF]},
        ("torch.logsumexp(x, -1)",),
        ("jax.nn.logsumexp(x)",),
        "numerics.logsumexp(x)",
    ),
    Case(
        "cumulative_logsumexp",
        {"x": [-INF, 0.0, 1000.0]},
        ("torch.log(torch.cumsum(torch.exp(x), -1))", "torch.logcumsumexp(x, -1)"),
        ("jnp.log(jnp.cumsum(jnp.exp(x)))", "jax.lax.cumlogsumexp(x)"),
        "numerics.cumulative_logsumexp(x)",
    ),
    Case(
        "soft_cap",
        {"x": 300.0},
        ("torch.clamp(x, max=30)", "30 * torch.tanh(x / 30)"),
        ("jnp.minimum(x, 30)", "30 * jnp.tanh(x / 30)"),
        "numerics.soft_cap(x, 30.0)",
    ),
)

ROOTS = (
    Case(
        "divide",
        {"x": 1.0, "y": 0.0},
        ("torch.where(y != 0, x / y, 0.0)",),
        ("jnp.where(y != 0, x / y, 0.0)",),
        "numerics.divide(x, y)",
        by="y",
    ),
    Case(
        "reciprocal",
        {"x": 0.0},
        ("torch.where(x != 0, 1 / x, 0.0)",),
        ("jnp.where(x != 0, 1 / x, 0.0)",),
        "numerics.reciprocal(x)",
    ),
    Case("sqrt", {"x": 0.0}, ("torch.sqrt(x)",), ("jnp.sqrt(x)",), "numerics.sqrt(x)"),
    Case("rsqrt", {"x": 0.0}, ("torch.rsqrt(x)",), ("jax.lax.rsqrt(x)",), "numerics.rsqrt(x)"),
    Case("power", {"x": 0.0}, ("x**0.5",), ("x**0.5",), "numerics.power(x, 0.5)"),
    Case("power", {"x": 0.0, "y": 0.0}, ("x**y",), ("x**y",), "numerics.power(x, 0.0)"),
    Case("arccos", {"x": 1.0}, ("torch.arccos(x)",), ("jnp.arccos(x)",), "numerics.arccos(x)"),
    Case("arctanh", {"x": 1.0}, ("torch.arctanh(x)",), ("jnp.arctanh(x)",), "numerics.arctanh(x)"),
    Case(
        "arctan2",
        {"x": 0.0, "y": 0.0},
        ("torch.arctan2(y, x)",),
        ("jnp.arctan2(y, x)",),
        "numerics.arctan2(y, x)",
    ),
)

NORMS = (
    Case(
        "norm",
        {"x": [0.0, 0.0]},
        ("(x * x).sum().sqrt()", "torch.linalg.norm(x)"),
        ("jnp.sqrt((x * x).sum())", "jnp.linalg.norm(x)", "optax.safe_norm(x, 0.0)"),
        "numerics.norm(x)",
    ),
    Case(
        "norm",
        {"x": [3e30, 4e30]},
        ("(x * x).sum().sqrt()", "torch.linalg.norm(x)"),
        ("jnp.sqrt((x * x).sum())", "jnp.linalg.norm(x)", "optax.safe_norm(x, 0.0)"),
        "numerics.norm(x)",
    ),
    Case(
        "normalize",
        {"x": [0.0, 0.0]},
        ("x / torch.linalg.norm(x)", "F.normalize(x, dim=-1)"),
        ("x / jnp.linalg.norm(x)",),
        "numerics.normalize(x)",
    ),
    Case(
        "variance",
        {"x": [10000.0, 10001.0, 10002.0]},
        ("(x * x).mean() - x.mean() ** 2", "torch.var(x, correction=0)"),
        ("(x * x).mean() - x.mean() ** 2", "jnp.var(x)"),
        "numerics.variance(x)",
    ),
    Case(
        "std",
        {"x": [2.0, 2.0]},
        ("x.var(correction=0).sqrt()", "torch.std(x, correction=0)"),
        ("jnp.sqrt(x.var())", "jnp.std(x)"),
        "numerics.std(x)",
    ),
    Case(
        "std",
        {"x": [0.1, 0.1, 0.1]},
        ("torch.std(x, correction=0)",),
        ("jnp.std(x)",),
        "numerics.std(x)",
    ),
    Case(
        "rms_norm",
        {"x": [300.0, 400.0]},
        ("x * torch.rsqrt((x * x).mean() + 1e-6)", "F.rms_norm(x, [2], eps=1e-6)"),
        ("x * jax.lax.rsqrt((x * x).mean() + 1e-6)",),
        "numerics.rms_norm(x)",
        format="float16",
    ),
    Case(
        "layer_norm",
        {"x": [2.0, 2.0]},
        ("(x - x.mean()) / (x.var(correction=0).sqrt() + 1e-5)", "F.layer_norm(x, [2])"),
        ("(x - x.mean()) / (x.std() + 1e-5)", "jax.nn.standardize(x)"),
        "numerics.layer_norm(x)",
    ),
    Case(
        "layer_norm",
        {"x": [400.0, -400.0]},
        ("(x - x.mean()) / (((x - x.mean()) ** 2).mean() + 1e-5).sqrt()", "F.layer_norm(x, [2])"),
        ("(x - x.mean()) / jnp.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)", "jax.nn.standardize(x)"),
        "numerics.layer_norm(x)",
        format="float16",
    ),
)

LOSSES = (
    Case(
        "binary_cross_entropy",
        {"x": [200.0], "y": [1.0]},
        ("-(y * torch.sigmoid(x).log() + (1 - y) * (1 - torch.sigmoid(x)).log())",),
        ("-(y * jnp.log(jax.nn.sigmoid(x)) + (1 - y) * jnp.log(1 - jax.nn.sigmoid(x)))",),
        "losses.binary_cross_entropy(x, y)",
    ),
    Case(
        "binary_cross_entropy",
        {"x": [200.0], "y": [0.0]},
        ("F.binary_cross_entropy(torch.sigmoid(x), y)", "F.binary_cross_entropy_with_logits(x, y)"),
        (
            "-jnp.log(1 - jax.nn.sigmoid(x))",
            "optax.sigmoid_binary_cross_entropy(x, y)",
        ),
        "losses.binary_cross_entropy(x, y)",
    ),
    Case(
        "cross_entropy",
        {"x": [[1.0, 2.0]], "y": [-100]},
        ("F.cross_entropy(x, y)",),
        ("jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x, y), where=y != -100)",),
        "losses.cross_entropy(x, y)",
    ),
    Case(
        "cross_entropy",
        {"x": [[0.0, 0.0, -INF]], "y": [0]},
        ("F.cross_entropy(x, y, label_smoothing=0.1)",),
        ("optax.softmax_cross_entropy(x, optax.smooth_labels(jax.nn.one_hot(y, 3), 0.1)).mean()",),
        "losses.cross_entropy(x, y, label_smoothing=0.1)",
    ),
    Case(
        "cross_entropy",
        {"x": [[0.0, 0.0, -INF]], "y": [[1.0, 0.0, 0.0]]},
        ("F.cross_entropy(x, y)",),
        ("optax.softmax_cross_entropy(x, y).mean()", "optax.safe_softmax_cross_entropy(x, y).mean()"),
        "losses.cross_entropy(x, y)",
    ),
    Case(
        "focal",
        {"x": [[80.0, 0.0]], "y": [0]},
        ("((1 - x.softmax(1)[:, 0]) ** 0.5 * F.cross_entropy(x, y)).mean()",),
        ("jnp.mean((1 - jax.nn.softmax(x)[:, 0]) ** 0.5 * -jax.nn.log_softmax(x)[:, 0])",),
        "losses.focal(x, y, gamma=0.5)",
    ),
    Case(
        "binary_focal",
        {"x": [40.0], "y": [1.0]},
        ("(1 - torch.sigmoid(x)) ** 0.5 * F.softplus(-x)",),
        ("optax.sigmoid_focal_loss(x, y, gamma=0.5)",),
        "losses.binary_focal(x, y, gamma=0.5)",
    ),
    Case(
        "kl_divergence",
        {"x": [[0.0, -INF]], "y": [[1.0, 0.0]]},
        ("(y * (y.log() - x)).sum()", "F.kl_div(x, y, reduction='batchmean')"),
        ("(y * (jnp.log(y) - x)).sum()", "optax.kl_divergence(x, y).mean()"),
        "losses.kl_divergence(x, y)",
    ),
    Case(
        "js_divergence",
        {"x": [[0.0, -INF]], "y": [[-INF, 0.0]]},
        ("(x.exp() * (x - torch.logaddexp(x, y))).sum()",),
        ("(jnp.exp(x) * (x - jnp.logaddexp(x, y))).sum()",),
        "losses.js_divergence(x, y)",
    ),
    Case(
        "gaussian_nll",
        {"mean": [1.0], "y": [1.0], "var": [0.0]},
        ("(var.log() + (y - mean) ** 2 / var) / 2", "F.gaussian_nll_loss(mean, y, var)"),
        (
            "(jnp.log(var) + (y - mean) ** 2 / var) / 2",
            "-jax.scipy.stats.norm.logpdf(y, mean, jnp.sqrt(var))",
        ),
        "losses.gaussian_nll(mean, y, var)",
        by="var",
    ),
    Case(
        "poisson_nll",
        {"x": [100.0], "y": [1.0]},
        ("F.poisson_nll_loss(x, y)",),
        ("jnp.exp(x) - y * x",),
        "losses.poisson_nll(x, y)",
    ),
    Case(
        "negative_binomial_nll",
        {"x": [1.0], "y": [1.0], "r": [1e10]},
        ("-torch.distributions.NegativeBinomial(r, logits=x - r.log()).log_prob(y)",),
        ("-jax.scipy.stats.nbinom.logpmf(y, r, r / (r + jnp.exp(x)))",),
        "losses.negative_binomial_nll(x, y, r)",
    ),
    Case(
        "huber",
        {"x": [1e20], "y": [0.0]},
        ("torch.sqrt(1 + (x - y) ** 2) - 1", "F.huber_loss(x, y)"),
        ("jnp.sqrt(1 + (x - y) ** 2) - 1", "optax.huber_loss(x, y)"),
        "losses.huber(x, y)",
    ),
    Case(
        "log_cosh",
        {"x": [100.0], "y": [0.0]},
        ("torch.log(torch.cosh(x - y))",),
        ("jnp.log(jnp.cosh(x - y))", "optax.log_cosh(x, y)"),
        "losses.log_cosh(x, y)",
    ),
    Case(
        "hinge",
        {"x": [1.0], "y": [1.0]},
        ("torch.clamp(1 - y * x, min=0)", "F.relu(1 - y * x)"),
        ("jnp.maximum(1 - y * x, 0)", "optax.hinge_loss(x, y)"),
        "losses.hinge(x, y)",
    ),
    Case(
        "cosine_similarity",
        {"x": [[0.0, 0.0]], "y": [[1.0, 0.0]]},
        ("(x * y).sum() / (x.norm() * y.norm())", "F.cosine_similarity(x, y)"),
        ("(x * y).sum() / (jnp.linalg.norm(x) * jnp.linalg.norm(y))", "optax.cosine_similarity(x, y)"),
        "losses.cosine_similarity(x, y)",
    ),
    Case(
        "cosine_embedding",
        {"x": [[0.0, 0.0]], "y": [[1.0, 0.0]], "t": [1.0]},
        ("F.cosine_embedding_loss(x, y, t)",),
        ("optax.cosine_distance(x, y)", "optax.cosine_distance(x, y, epsilon=1e-6)"),
        "losses.cosine_embedding(x, y, t)",
    ),
    Case(
        "info_nce",
        {"x": [[0.0, 0.0], [0.0, 1.0]], "y": [[1.0, 0.0], [0.0, 1.0]]},
        ("F.cross_entropy(F.normalize(x) @ F.normalize(y).T / 0.07, torch.arange(2))",),
        ("-jnp.diag(jax.nn.log_softmax(x / jnp.linalg.norm(x, axis=1, keepdims=True) @ y.T / 0.07)).mean()",),
        "losses.info_nce(x, y)",
    ),
)

# One table per theme.
THEMES: dict[str, tuple[Case, ...]] = {
    "logs": LOGS,
    "softmax": SOFTMAX,
    "roots": ROOTS,
    "norms": NORMS,
    "losses": LOSSES,
}
