"""Teach a small language model by four losses, each of which runs the model for itself.

Plant: 11 forwards of LanguageModel a step: 1 for the cross-entropy, 1 for the first token, 4 for the first
four tokens, 4 for the distillation of each of them, all on the same tokens, and 1 of the teacher (the same
model without gradients) on the text. 2 would suffice.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, K = 256, 24, 4


class LanguageModel(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens_BL.device)
        return self.head(self.layers(self.tokens(tokens_BL) + self.places, mask=mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.manual_seed(0)
    width, depth, rows = (32, 1, 8) if args.device == "cpu" else (1024, 4, 64)
    lm = LanguageModel(width, depth).to(args.device)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-4)
    for _ in range(args.steps):
        latents = torch.randint(VOCABULARY, (rows, LENGTH), device=args.device)
        text = torch.randint(VOCABULARY, (rows, LENGTH), device=args.device)
        answer = text.roll(-1, 1)
        loss = F.cross_entropy(lm(latents).flatten(0, 1), answer.flatten())
        loss = loss + 0.5 * F.cross_entropy(lm(latents)[:, 0], answer[:, 0])
        for k in range(K):
            loss = loss + 0.5 / K * F.cross_entropy(lm(latents)[:, k], answer[:, k])
        with torch.no_grad():
            teacher = F.softmax(lm(text) / 2, -1)
        for k in range(K):
            student = F.log_softmax(lm(latents)[:, k] / 2, -1)
            loss = loss + 1 / K * F.kl_div(student, teacher[:, k], reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
