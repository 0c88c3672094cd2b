import string

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(11)
CHARS = string.ascii_lowercase[:10]
N_CLASS = len(CHARS) + 1  # 0 is blank


class CaptchaSet(Dataset):
    """Synthetic strips: each character is a fixed 8 x 6 glyph plus noise, glyphs side by side."""

    def __init__(self, n, width=60):
        g = torch.Generator().manual_seed(5)
        self.glyph = (torch.rand(N_CLASS, 8, 6, generator=g) > 0.5).float()
        self.width = width
        self.labels = []
        for i in range(n):
            length = 3 + int(torch.randint(0, 4, (1,), generator=g))
            if i % 97 == 96:
                length = 9
            self.labels.append(torch.randint(1, N_CLASS, (length,), generator=g))
        self.noise = 0.1 * torch.randn(n, 8, width, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = self.noise[i].clone()
        for k, c in enumerate(self.labels[i].tolist()):
            img[:, 6 * k: 6 * k + 6] += self.glyph[c]
        return img, self.labels[i]


def collate(batch):
    imgs, labels = zip(*batch)
    lengths = torch.tensor([len(l) for l in labels])
    return torch.stack(imgs).unsqueeze(1), pad_sequence(labels, batch_first=True), lengths


class CRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 4)),
        )
        self.rnn = nn.LSTM(64, 48, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(96, N_CLASS)

    def forward(self, x):
        f = self.conv(x)
        f = f.permute(0, 3, 1, 2).flatten(2)
        out, _ = self.rnn(f)
        return F.log_softmax(self.fc(out), dim=-1).transpose(0, 1)


loader = DataLoader(CaptchaSet(480), batch_size=24, shuffle=False, collate_fn=collate)
net = CRNN()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
criterion = nn.CTCLoss(blank=0)

for epoch in range(2):
    running = 0.0
    for it, (images, targets, target_lengths) in enumerate(loader):
        log_probs = net(images)
        input_lengths = torch.full((images.size(0),), log_probs.size(0))
        loss = criterion(log_probs, targets, input_lengths, target_lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
        if it % 2 == 0:
            print("epoch %d it %2d loss %.4f" % (epoch, it, loss.item()))
    print("epoch", epoch, "mean", running / len(loader))
