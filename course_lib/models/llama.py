"""A Llama-shaped decoder, small enough to train on a laptop.

Token embedding → blocks of (RMSNorm → attention → add, RMSNorm → SwiGLU → add) → RMSNorm → head.
Attention has rotary positions and grouped key/value heads. Parameter names and shapes are those
of Hugging Face's Llama, so that `ModelSpec.tensors()` lists exactly this model's tensors.

Shapes: B sequences of S tokens, hidden size H, A heads of size D, K key/value heads, vocabulary V.
"""

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.specs import ModelSpec


def build(spec: ModelSpec, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> "Llama":
    """The model that `spec` describes, with weights drawn from `seed`, on the CPU."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Llama(spec).to(dtype)


class Llama(nn.Module):
    """Maps token ids [B, S] to logits [B, S, V]."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.model = Decoder(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        if spec.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean next-token cross-entropy of token ids [B, S], computed in fp32."""
        logits = self(tokens[:, :-1]).float()  # [B, S-1, V]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Decoder(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, eps=1e-5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)  # [B, S, H]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class Block(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = SwiGLU(spec)
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=1e-5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.head_dim = spec.head_dim
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, spec.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # q [B, A, S, D]; k and v [B, K, S, D]
        out = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )  # [B, A, S, D]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def rotate(x: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
    """Rotary positions (Su et al. 2021) for x [B, A, S, D].

    At position s, the pair of elements (i, i + D/2) is turned by the angle s · base^(-2i/D).
    """
    seq, dim = x.shape[-2:]
    frequencies = base ** (-torch.arange(0, dim, 2, device=x.device) / dim)  # [D/2]
    angles = torch.arange(seq, device=x.device)[:, None] * frequencies  # [S, D/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
