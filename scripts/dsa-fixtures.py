#!/usr/bin/env python3
"""Writes what Hugging Face transformers computes for the attention layers of DeepSeek-V3.2 and GLM-5.

    python3 -m venv venv && venv/bin/pip install torch transformers==5.17.0 safetensors
    venv/bin/python scripts/dsa-fixtures.py tests/fixtures

For each model a NAME.json with its configuration and a NAME.safetensors with

    model.layers.N.self_attn.*   weights, bf16 (their f32 values are what f32 runs use)
    x, x1                        hidden states [B, T, hidden] of layers 0 and 1
    RUN.out                      what the attention gives, f32
    RUN.positions                what its indexer chose, I32; of a row that sees fewer, some it can't see
    RUN.scores                   the indexer's scores, masked
    RUN.bf16                     what the attention gives in bf16 over the same positions

where RUN is "below", "at" and "whole" (prompts of fewer tokens than index_topk, as many, and many more),
"chunk" (the rest of "whole" after a first chunk), "decode" (token by token after a prompt) and "shared" (layer 1,
which takes the positions of layer 0; GLM-5 alone); and rope.cos, rope.sin, f32, at rope.positions. Models are small, but the latent has the 512 and 64 numbers of
the real ones, and the indexer's heads have 128.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import DeepseekV32Config, DynamicCache, GlmMoeDsaConfig
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

TOKENS, CHUNK, PROMPT, TOP = 72, 40, 64, 16

SIZES = dict(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=16,
    v_head_dim=16,
    index_n_heads=8,
    index_head_dim=128,
    index_topk=TOP,
    max_position_embeddings=10240,
)

MODELS = {
    "deepseek_v32": (
        DeepseekV32Config,
        modeling_deepseek_v32,
        dict(
            num_hidden_layers=1,
            rope_theta=10000.0,
            # Short enough a trained context that all three parts of YaRN's ramp are there, and mscales that
            # do not cancel.
            rope_scaling=dict(
                type="yarn",
                factor=40,
                mscale=1.0,
                mscale_all_dim=0.707,
                original_max_position_embeddings=256,
                beta_fast=32,
                beta_slow=1,
            ),
        ),
    ),
    "glm_moe_dsa": (
        GlmMoeDsaConfig,
        modeling_glm_moe_dsa,
        dict(
            num_hidden_layers=2,
            rope_parameters=dict(rope_theta=1000000.0, rope_type="default"),
            rms_norm_eps=1e-5,
            attention_bias=True,
            indexer_types=["full", "shared"],
        ),
    ),
}


class Scores(TorchFunctionMode):
    """Keeps what top-k is taken of."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.topk:
            self.last = args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def randomise(module, generator):
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            value = noise / parameter.shape[1] ** 0.5
        elif name.endswith("norm.weight"):
            value = 1 + 0.2 * noise
        else:
            value = 0.2 * noise
        parameter.data = value.to(torch.bfloat16).float()


class Layer:
    """One attention module, in f32 or bf16."""

    def __init__(self, module, rotary, dtype):
        self.module, self.rotary, self.dtype = module, rotary, dtype

    def __call__(self, x, first=0, cache=None, positions=None):
        x = x.to(self.dtype)
        batch, tokens, _ = x.shape
        at = torch.arange(first, first + tokens)
        allowed = torch.arange(first + tokens)[None, :] <= at[:, None]
        mask = torch.zeros(allowed.shape, dtype=self.dtype).masked_fill(~allowed, torch.finfo(self.dtype).min)
        mask = mask.expand(batch, 1, -1, -1)
        ids = at[None, :].expand(batch, -1)
        shared = getattr(self.module, "indexer", None) is None
        kwargs = dict(prev_topk_indices=positions) if shared else {}
        own = None
        if positions is not None and not shared:
            own = self.module.indexer.forward
            self.module.indexer.forward = lambda *args, **kwargs: positions
        scores = Scores()
        with torch.no_grad(), scores:
            out = self.module(
                hidden_states=x,
                position_embeddings=self.rotary(x, position_ids=ids),
                attention_mask=mask,
                position_ids=ids,
                past_key_values=cache,
                **kwargs,
            )[0]
        if own is not None:
            self.module.indexer.forward = own
        return out, getattr(scores, "last", None)


def chosen(layer, x, first=0, cache=None):
    """A run by its own indexer: output, positions, scores."""
    positions = None
    indexer = layer.module.indexer
    own = indexer.forward

    def keep(*args, **kwargs):
        nonlocal positions
        positions = own(*args, **kwargs)
        return positions

    indexer.forward = keep
    out, scores = layer(x, first, cache)
    indexer.forward = own
    return out, positions, scores


def write(name, folder):
    make_config, modeling, fields = MODELS[name]
    fields = {**SIZES, **fields}
    config = make_config(**fields)
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(20260917)
    classes = vars(modeling)
    prefix = next(n.removesuffix("Attention") for n in classes if n.endswith("DsaAttention") or n == "DeepseekV32Attention")
    rotary = classes[prefix + "RotaryEmbedding"](config)
    tensors, layers = {}, []
    for i in range(config.num_hidden_layers):
        module = classes[prefix + "Attention"](config, i).eval()
        randomise(module, generator)
        for key, value in module.state_dict().items():
            tensors[f"model.layers.{i}.self_attn.{key}"] = value.to(torch.bfloat16)
        half = classes[prefix + "Attention"](config, i).eval()
        half.load_state_dict(module.state_dict())
        half = half.to(torch.bfloat16)
        if getattr(half, "indexer", None) is not None:
            half.indexer.weights_proj.float()  # as the model keeps it
        layers.append([Layer(module, rotary, torch.float32), Layer(half, rotary, torch.bfloat16)])

    def hidden():
        # bf16 numbers, so that both dtypes see the same.
        return torch.randn(2, TOKENS, config.hidden_size, generator=generator).to(torch.bfloat16).float()

    def keep(run, out, positions, scores, half):
        tensors[f"{run}.out"] = out
        if positions is not None:
            tensors[f"{run}.positions"] = positions.to(torch.int32)
        if scores is not None:
            tensors[f"{run}.scores"] = scores
        tensors[f"{run}.bf16"] = half

    far = torch.tensor([0, 1, 100, 4095, 10239])
    cos, sin = rotary(torch.zeros(1), position_ids=far[None])
    half = config.qk_rope_head_dim // 2
    tensors.update({"rope.positions": far, "rope.cos": cos[0, :, :half], "rope.sin": sin[0, :, :half]})

    x = hidden()
    tensors["x"] = x.to(torch.bfloat16)
    full, half = layers[0]
    for run, tokens in [("below", TOP - 4), ("at", TOP), ("whole", TOKENS)]:
        out, positions, scores = chosen(full, x[:, :tokens])
        keep(run, out, positions, scores, half(x[:, :tokens], positions=positions)[0])
        if run == "whole":
            whole = positions

    caches = [DynamicCache(config=config) for _ in range(2)]
    for layer, cache in zip((full, half), caches):
        layer(x[:, :CHUNK], cache=cache)
    out, positions, scores = chosen(full, x[:, CHUNK:], CHUNK, caches[0])
    keep("chunk", out, positions, scores, half(x[:, CHUNK:], CHUNK, caches[1], positions)[0])

    caches = [DynamicCache(config=config) for _ in range(2)]
    for layer, cache in zip((full, half), caches):
        layer(x[:, :PROMPT], cache=cache)
    runs = []
    for t in range(PROMPT, TOKENS):
        token = x[:, t : t + 1]
        out, positions, scores = chosen(full, token, t, caches[0])
        scores = torch.nn.functional.pad(scores, (0, TOKENS - t - 1), value=float("-inf"))
        runs.append((out, positions, scores, half(token, t, caches[1], positions)[0]))
    keep("decode", *(torch.cat(parts, dim=1) for parts in zip(*runs)))

    if len(layers) > 1:
        x = hidden()
        tensors["x1"] = x.to(torch.bfloat16)
        full, half = layers[1]
        keep("shared", full(x, positions=whole)[0], None, None, half(x, positions=whole)[0])

    tensors = {key: value.contiguous() for key, value in tensors.items()}
    versions = dict(transformers=transformers.__version__, torch=torch.__version__)
    save_file(tensors, folder / f"{name}.safetensors", metadata=versions)
    # What the configuration was made of, as a checkpoint's config.json has it.
    (folder / f"{name}.json").write_text(json.dumps({"model_type": name, **fields}, indent=2) + "\n")
    # A fixture whose sets hang on roundings would test little.
    scores = tensors["whole.scores"]
    ranked = scores.masked_fill(scores < -1e30, float("nan"))
    clear = 0
    for row in ranked.reshape(-1, TOKENS):
        seen = row[~row.isnan()].sort(descending=True).values
        clear += len(seen) <= TOP or bool(seen[TOP - 1] - seen[TOP] > 1e-3 * (seen[0] - seen[-1]))
    print(f"{name}: {clear} of {ranked.numel() // TOKENS} rows have a clear set")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    for name in MODELS:
        write(name, pathlib.Path(sys.argv[1]))
