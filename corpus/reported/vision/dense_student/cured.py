# Self-distillation for dense prediction: a teacher from stage 1 labels unlabelled images for a student.
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
C, S = 12, 20


def scenes(n, gen):
    lab = torch.zeros(n, S, S, dtype=torch.long)
    for i in range(n):
        for _ in range(5):
            c = int(torch.randint(0, C, (1,), generator=gen))
            r, q = (int(v) for v in torch.randint(0, S - 6, (2,), generator=gen))
            h, w = (int(v) for v in torch.randint(5, 11, (2,), generator=gen))
            lab[i, r:r + h, q:q + w] = c
    img = palette[lab].permute(0, 3, 1, 2) + 0.6 * torch.randn(n, 3, S, S, generator=gen)
    return img, lab


class SegNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c1 = nn.Conv2d(3, width, 5, padding=2)
        self.c2 = nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, C, 1)

    def forward(self, x):
        return {"out": self.out(F.relu(self.c2(F.relu(self.c1(x)))))}


g = torch.Generator().manual_seed(11)
palette = torch.randn(C, 3, generator=g) * 1.5
img_l, lab_l = scenes(60, g)
img_u, _ = scenes(200, g)
img_v, lab_v = scenes(40, g)

teacher = SegNet(32)
opt_t = torch.optim.Adam(teacher.parameters(), lr=3e-3)
for it in range(120):
    idx = torch.randint(0, 60, (12,))
    loss = F.cross_entropy(teacher(img_l[idx])["out"], lab_l[idx])
    opt_t.zero_grad(); loss.backward(); opt_t.step()
print("teacher loss", loss.item())
teacher.eval()

net = SegNet(16)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for it in range(220):
    idx = torch.randint(0, 200, (12,))
    target_out = net(img_u[idx])
    student = F.log_softmax(target_out["out"], dim=1)
    with torch.no_grad():
        soft = F.softmax(teacher(img_u[idx])["out"], dim=1)
    loss_kd = F.kl_div(student, soft, reduction="none")
    mask = (soft != 250).float()
    loss_kd = (loss_kd * mask).sum() / mask.sum()
    loss = 10.0 * loss_kd
    opt.zero_grad(); loss.backward(); opt.step()
    if it % 40 == 0:
        print("iter", it, "kd", loss_kd.item())

with torch.no_grad():
    val = F.cross_entropy(net(img_v)["out"], lab_v).item()
print("FINAL", val)
