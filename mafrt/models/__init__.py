"""The shared base, its LoRA adapters, value heads, sharding and quantization."""
