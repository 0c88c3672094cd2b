"""Estimate a smooth camera trajectory (unit quaternions) from noisy direction measurements."""
import torch

torch.manual_seed(13)
N_FRAMES, N_DIRS = 24, 10


def normalize(q):
    return q / q.norm(dim=-1, keepdim=True)


def rotate(q, v):
    """q (N,4) as w,x,y,z; v (M,3) -> (N,M,3)"""
    w, u = q[:, None, :1], q[:, None, 1:]
    v = v[None].expand(len(q), -1, -1)
    u = u.expand_as(v)
    t = 2 * torch.cross(u, v, dim=-1)
    return v + w * t + torch.cross(u, t, dim=-1)


def geodesic(q1, q2):
    cos_half = (q1 * q2).sum(-1).abs().clamp(max=1.0)
    return 2 * torch.acos(cos_half)


# ground truth: a slow turn around a tilted axis
angles = torch.linspace(0.0, 1.2, N_FRAMES)
axis = torch.tensor([0.2, 0.9, 0.3])
axis = axis / axis.norm()
q_true = torch.cat([torch.cos(angles / 2)[:, None], torch.sin(angles / 2)[:, None] * axis], 1)
landmarks = torch.randn(N_DIRS, 3)
landmarks = landmarks / landmarks.norm(dim=1, keepdim=True)
measured = rotate(q_true, landmarks) + 0.1 * torch.randn(N_FRAMES, N_DIRS, 3)

# every frame starts with the identity rotation
q_raw = torch.zeros(N_FRAMES, 4)
q_raw[:, 0] = 1.0
q_raw.requires_grad_(True)
optimizer = torch.optim.Adam([q_raw], lr=0.02)

for it in range(250):
    q = normalize(q_raw)
    data_term = (rotate(q, landmarks) - measured).pow(2).sum(-1).mean()
    smooth_term = geodesic(q[1:], q[:-1]).pow(2).mean()
    loss = data_term + 2.0 * smooth_term
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 25 == 0:
        with torch.no_grad():
            err = torch.rad2deg(geodesic(normalize(q_raw), q_true)).mean()
        print(f"{it:3d}: loss {loss.item():.5f}, mean error {err.item():.2f} deg")
