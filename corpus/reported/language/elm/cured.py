import torch
from torch import nn
from torch.amp import GradScaler, autocast

torch.manual_seed(42)
VOCAB, LEN, CLASSES = 200, 20, 6


class TextNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 64)
        self.fc1 = nn.Linear(64, 128)
        self.fc2 = nn.Linear(128, 128)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(128, CLASSES)

    def forward(self, x):
        h = torch.relu(self.fc1(self.embedding(x)))
        h = torch.relu(self.fc2(h)).amax(dim=1)
        return self.out(self.dropout(h))


topic_words = torch.softmax(torch.randn(CLASSES, VOCAB) * 1.1, dim=-1)


def get_data(n):
    y = torch.randint(CLASSES, (n,))
    return torch.multinomial(topic_words[y], LEN, replacement=True), y


x_train, y_train = get_data(4096)
x_test, y_test = get_data(2000)

model = TextNet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = GradScaler("cpu", init_scale=2.0 ** 14)

step = 0
for epoch in range(5):
    model.train()
    perm = torch.randperm(len(x_train))
    for i in range(0, len(perm), 128):
        idx = perm[i:i + 128]
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            output = model(x_train[idx])
            loss = criterion(output, y_train[idx])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        step += 1

model.eval()
with torch.no_grad():
    err = (model(x_test).argmax(-1) != y_test).float().mean().item()
print("FINAL", err)
