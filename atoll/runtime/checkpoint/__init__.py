"""Checkpoints: written by any plan, read by any other; safetensors only, never a pickle."""
