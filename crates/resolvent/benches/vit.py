"""The same vision transformer in eager PyTorch, for `cargo bench --bench vit_step -- PYTHON`, which starts this and
asks for one training step per line of standard input, `f32` or `bf16` (autocast); each is answered with its seconds: forward,
backward, AdamW.
"""

import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, heads, mlp_dim):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.projection, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp_in, self.mlp_out = nn.Linear(dim, mlp_dim), nn.Linear(mlp_dim, dim)

    def forward(self, x):
        batch, seq, dim = x.shape
        q, k, v = self.projection(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, seq, dim)
        x = x + self.output(attended)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class Vit(nn.Module):
    def __init__(self, pixels, patch, dim, depth, heads, mlp_dim, classes):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (pixels // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*[Block(dim, heads, mlp_dim) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        tokens = self.patch(x).flatten(2).mT
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1) + self.positions
        return self.head(self.norm(self.blocks(tokens)[:, 0]))


def main(threads, batch, pixels, patch, dim, depth, heads, mlp_dim, classes):
    torch.set_num_threads(threads)
    model = Vit(pixels, patch, dim, depth, heads, mlp_dim, classes)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    pictures, labels = torch.randn(batch, 3, pixels, pixels), torch.arange(batch) % classes
    parameters = sum(p.numel() for p in model.parameters())
    print(torch.__version__, parameters, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=line.strip() == "bf16"):
            loss = F.cross_entropy(model(pictures), labels)
        loss.item()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimiser.step()
        optimiser.zero_grad()
        end = time.perf_counter()
        print(forward - start, backward - forward, end - backward, flush=True)


main(*map(int, sys.argv[1:]))
