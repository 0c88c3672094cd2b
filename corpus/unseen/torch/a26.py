"""Rotation averaging: recover camera orientations from relative rotations (6D parameters, geodesic loss)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def rot6d_to_matrix(v):
    a, b = v[..., :3], v[..., 3:]
    x = F.normalize(a, dim=-1)
    z = F.normalize(torch.cross(x, b, dim=-1), dim=-1)
    y = torch.cross(z, x, dim=-1)
    return torch.stack([x, y, z], dim=-1)


def geodesic_distance(R1, R2):
    m = R1 @ R2.transpose(-1, -2)
    cos = (m.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    cos = torch.clamp(cos, -1.0, 1.0)
    return torch.acos(cos)


def random_rotation(n, max_angle):
    axis = F.normalize(torch.randn(n, 3), dim=-1)
    ang = max_angle * torch.rand(n, 1, 1)
    K = torch.zeros(n, 3, 3)
    K[:, 0, 1], K[:, 0, 2], K[:, 1, 2] = -axis[:, 2], axis[:, 1], -axis[:, 0]
    K = K - K.transpose(1, 2)
    return torch.eye(3) + ang.sin() * K + (1 - ang.cos()) * K @ K


class CameraGraph(nn.Module):
    def __init__(self, n_cams, edges, relative):
        super().__init__()
        self.edges, self.relative = edges, relative
        start = torch.tensor([1.0, 0, 0, 0, 1, 0]).repeat(n_cams, 1)
        self.v = nn.Parameter(start + 0.05 * torch.randn(n_cams, 6))

    def forward(self):
        R = rot6d_to_matrix(self.v)
        i, j = self.edges
        predicted = R[j] @ R[i].transpose(1, 2)
        return geodesic_distance(predicted, self.relative)


class Experiment:
    def __init__(self, n_cams=20, seed=0, lr=0.03):
        torch.manual_seed(seed)
        truth = random_rotation(n_cams, 0.8)
        i = torch.arange(n_cams)
        edges = torch.stack([torch.cat([i, i]), torch.cat([(i + 1) % n_cams, (i + 3) % n_cams])])
        relative = truth[edges[1]] @ truth[edges[0]].transpose(1, 2)
        self.graph = CameraGraph(n_cams, edges, relative)
        self.opt = torch.optim.Adam(self.graph.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, gamma=0.985)

    def step(self):
        err = self.graph()
        loss = err.mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.sched.step()
        return err.detach()

    def run(self, steps=160):
        for k in range(steps):
            err = self.step()
            if k % 20 == 0:
                deg = err * 57.2958
                print(f"step {k:4d}  mean {deg.mean().item():.4f} deg  max {deg.max().item():.4f} deg")


if __name__ == "__main__":
    Experiment().run()
