"""MosaicML's published A100 runs (`fixtures/mosaicml_a100_2048.csv`), and the sizes of its MPT models."""

import csv
from pathlib import Path

from toolkit.models.shape import ModelShape, Tensor

FIXTURE = Path(__file__).parents[1] / "fixtures" / "mosaicml_a100_2048.csv"
# Width and layers of MosaicML's MPT models (llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml).
MPT = {
    **{"125m": (768, 12), "350m": (1024, 24), "760m": (1536, 24), "1b": (2048, 24), "3b": (2560, 32)},
    **{"7b": (4096, 32), "13b": (5120, 40), "30b": (7168, 48), "70b": (8192, 80)},
}


def published() -> list[dict[str, str]]:
    lines = [line for line in FIXTURE.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def mpt(width: int, layers: int) -> ModelShape:
    """Return the shape of one of these models: learned positions, biases, a tied head, no gate."""
    shapes = {"norm_1": (width,), "Wqkv": (3 * width, width), "out_proj": (width, width), "norm_2": (width,)}
    shapes |= {"up_proj": (4 * width, width), "down_proj": (width, 4 * width)}
    weights = tuple(Tensor(name=f"{part}.weight", shape=size) for part, size in shapes.items())
    biases = tuple(Tensor(name=f"{part}.bias", shape=size[:1]) for part, size in shapes.items())
    outer = {"wte.weight": (50_368, width), "wpe.weight": (2048, width)}
    outer |= {"norm_f.weight": (width,), "norm_f.bias": (width,)}  # type: ignore[dict-item]
    return ModelShape(
        **{"model_type": "mpt", "gated_mlp": False, "activation": "gelu", "tied_embeddings": True, "head_dim": 64},
        **{"num_layers": layers, "hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 50_368},
        **{"num_attention_heads": width // 64, "num_kv_heads": width // 64},
        layers=(weights + biases,) * layers,
        outer=tuple(Tensor(name=name, shape=size) for name, size in outer.items()),
    )
