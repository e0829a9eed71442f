"""How long capturing takes and how much memory it needs: GPT-2 small and a 48-layer Llama-shaped 13B model, each in a fresh process.

    python benchmarks/capture.py [--json]

Limits: GPT-2 small within 10 s, the 13B model within 30 s, and no weights allocated (peak memory below 2 GB). Seconds are those of
`capture(job)`; loading PyTorch and transformers is listed beside them.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import time
from dataclasses import dataclass
from typing import Any

LIMITS = {"gpt2-small": 10.0, "llama-13b-48-layers": 30.0}
MEMORY_LIMIT_BYTES = 2e9


def _configured(name: str) -> tuple[Any, int, int, str]:
    """A function that builds the model, its vocabulary, its sequence length and the precision."""
    import transformers

    gpt2, llama = transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM  # their modules are loaded here, not while the clock runs
    if name == "gpt2-small":
        small = transformers.GPT2Config(use_cache=False)
        return lambda: gpt2(small), small.vocab_size, 1024, "fp32"
    large = transformers.LlamaConfig(
        num_hidden_layers=48,
        hidden_size=4608,
        intermediate_size=12800,
        num_attention_heads=36,
        num_key_value_heads=36,
        vocab_size=32000,
        max_position_embeddings=2048,
        use_cache=False,
    )
    return lambda: llama(large), large.vocab_size, 2048, "bf16"


@dataclass
class _Job:
    name: str
    model: Any
    vocabulary: int
    tokens: int
    precision: Any

    @staticmethod
    def loss(model: Any, batch: Any) -> Any:
        return model(**batch).loss

    def example_batch(self, samples: int) -> Any:
        import torch

        tokens = torch.randint(0, self.vocabulary, (samples, self.tokens))
        return {"input_ids": tokens, "labels": tokens.clone()}


def _measure(name: str, answers: Any) -> None:
    started = time.perf_counter()
    import torch

    from atoll.graph.capture import capture

    torch.set_num_threads(1)
    model, vocabulary, tokens, precision = _configured(name)
    loaded = time.perf_counter()
    processor_before = time.process_time()
    graph = capture(_Job(name, model, vocabulary, tokens, precision))
    answers.put(
        {
            "model": name,
            "seconds": time.perf_counter() - loaded,
            "processor_seconds": time.process_time() - processor_before,
            "import_seconds": loaded - started,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "parameters": graph.parameters,
            "layers": len(graph.layers),
            "operators": len(graph.nodes),
            "limit_seconds": LIMITS[name],
        }
    )


def run() -> list[dict[str, Any]]:
    """One row a model."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for name in LIMITS:
        answers = context.Queue()
        process = context.Process(target=_measure, args=(name, answers))
        process.start()
        rows.append(answers.get())
        process.join()
    return rows


def main() -> None:
    """Print the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows = run()
    for row in rows:
        row["ok"] = row["seconds"] <= row["limit_seconds"] and row["peak_memory_bytes"] < MEMORY_LIMIT_BYTES
    if as_json:
        machine = {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
        }
        print(json.dumps({"machine": machine, "rows": rows}, indent=1))
        return
    print(f"{'model':22}{'parameters':>12}{'layers':>8}{'operators':>11}{'seconds':>9}{'cpu s':>8}{'limit':>7}{'peak memory':>13}  ok")
    for row in rows:
        size = f"{row['parameters'] / 1e9:.2f} G"
        memory = f"{row['peak_memory_bytes'] / 1e9:.2f} GB"
        print(
            f"{row['model']:22}{size:>12}{row['layers']:>8}{row['operators']:>11}{row['seconds']:>9.1f}{row['processor_seconds']:>8.1f}"
            f"{row['limit_seconds']:>7.0f}{memory:>13}  {'yes' if row['ok'] else 'NO'}"
        )


if __name__ == "__main__":
    main()
