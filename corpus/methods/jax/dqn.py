"""DQN on a small grid: replay memory, and a target network that follows by Polyak averaging."""
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax

SIZE, GOAL, PITS = 5, (4, 4), {(1, 3), (3, 1), (2, 2)}
MOVES = [(0, 1), (0, -1), (1, 0), (-1, 0)]


def move(pos, action):
    r, c = pos[0] + MOVES[action][0], pos[1] + MOVES[action][1]
    new = (min(max(r, 0), SIZE - 1), min(max(c, 0), SIZE - 1))
    if new == GOAL:
        return new, 1.0, True
    if new in PITS:
        return new, -1.0, True
    return new, -0.01, False


def init(key, sizes=(SIZE * SIZE, 64, 64, 4)):
    keys = jax.random.split(key, 3)
    return [(jax.random.normal(k, (a, b)) * (1 / a) ** 0.5, jnp.zeros(b)) for k, a, b in zip(keys, sizes, sizes[1:])]


@jax.jit
def q_values(params, cell):
    x = jax.nn.one_hot(cell, SIZE * SIZE)
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def greedy(params):
    return np.asarray(q_values(params, jnp.arange(SIZE * SIZE))).argmax(1)


def returns(params, starts):
    best, total = greedy(params), 0.0
    for pos in starts:
        for _ in range(30):
            pos, reward, done = move(pos, best[pos[0] * SIZE + pos[1]])
            total += reward
            if done:
                break
    return total / len(starts)


def main(episodes=250, gamma=0.95, tau=0.02):
    random.seed(0)
    params = init(jax.random.key(0))
    target = params
    tx = optax.adam(1e-3)
    state = tx.init(params)

    @jax.jit
    def update(params, target, state, s, a, r, n, d):
        best = q_values(params, n).argmax(1)
        goal = r + gamma * (1 - d) * jnp.take_along_axis(q_values(target, n), best[:, None], 1)[:, 0]

        def loss_fn(params):
            chosen = jnp.take_along_axis(q_values(params, s), a[:, None], 1)[:, 0]
            return optax.huber_loss(chosen, goal).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, target, tau), state, loss

    starts = [(r, c) for r in range(SIZE) for c in range(SIZE) if (r, c) != GOAL and (r, c) not in PITS]
    memory = []
    for episode in range(episodes):
        pos, explore, best = random.choice(starts), max(0.1, 1 - episode / 150), greedy(params)
        for _ in range(25):
            cell = pos[0] * SIZE + pos[1]
            action = random.randrange(4) if random.random() < explore else int(best[cell])
            new, reward, done = move(pos, action)
            memory.append((cell, action, reward, new[0] * SIZE + new[1], float(done)))
            pos = new
            if len(memory) >= 200:
                batch = map(np.asarray, zip(*random.sample(memory[-5000:], 64)))
                params, target, state, loss = update(params, target, state, *batch)
            if done:
                break
        if episode % 50 == 49:
            print(f"{episode + 1:4d} loss {float(loss):.5f} mean return {returns(params, starts):.3f}")


if __name__ == "__main__":
    main()
