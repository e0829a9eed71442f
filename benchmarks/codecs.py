"""How fast codecs encode and decode fp32 beside a plain copy, how small they make it and what they lose.

Every round runs every codec once, so that whatever else the machine does falls on all of them; medians of rounds are shown. On one thread
the time is the processor's, not the clock's; on several, each encodes a part of the tensor.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from report import print_json, print_table

from atoll.codec.base import Codec
from atoll.codec.registry import decode, make_codec, relative_error

CODECS = ("none", "bf16", "fp16", "int8", "int4", "2-bit", "top-k:0.1", "top-k:0.01", "top-k-2-bit:64")


def naive_int8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What one writes first: every operator over the whole tensor."""
    blocks = tensor.view(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return (blocks / scales).round().to(torch.int8), scales


def naive_int8_back(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Its inverse."""
    return codes.to(torch.float32) * scales


Work = Callable[[], object]


def works(tensor: torch.Tensor) -> dict[str, tuple[Work, Work]]:
    """What is timed, by name: how it encodes and how it decodes."""
    out = torch.empty_like(tensor)
    codes, scales = naive_int8(tensor)
    found: dict[str, tuple[Work, Work]] = {
        "memcpy": (lambda: out.copy_(tensor), lambda: out.copy_(tensor)),
        "naive int8": (lambda: naive_int8(tensor), lambda: naive_int8_back(codes, scales)),
    }
    for text in CODECS[1:]:
        found[text] = _work(make_codec(text), tensor, out)
    return found


def _work(codec: Codec, tensor: torch.Tensor, out: torch.Tensor) -> tuple[Work, Work]:
    encoded = codec.encode(tensor)
    spare = codec.encode(tensor)  # senders encode the same tensors again and again: memory of earlier encodings is written again
    return lambda: codec.encode(tensor, reuse=spare), lambda: decode(encoded, out)


def together(pool: ThreadPoolExecutor, some: list[Work]) -> Work:
    """Each in a thread of its own, until all are done."""
    return some[0] if len(some) == 1 else lambda: [future.result() for future in [pool.submit(work) for work in some]]


def timed(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of one call."""
    start = clock()
    work()
    return clock() - start


def measure(megabytes: int, rounds: int, threads: int) -> list[dict[str, object]]:
    """One row a codec."""
    torch.set_num_threads(1)
    clock = time.thread_time if threads == 1 else time.perf_counter
    tensor = torch.randn(megabytes * 64, 4096, generator=torch.Generator().manual_seed(0))
    parts = [works(part) for part in tensor.chunk(threads)]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in parts[0]}
    with ThreadPoolExecutor(threads) as pool:
        for number in range(rounds + 1):
            for name in seconds:
                encode, back = (together(pool, [part[name][way] for part in parts]) for way in (0, 1))
                pair = timed(encode, clock), timed(back, clock)
                if number:  # the first round warms up
                    seconds[name].append(pair)
    medians = {name: (statistics.median(e for e, _ in pairs), statistics.median(d for _, d in pairs)) for name, pairs in seconds.items()}
    copy = sum(medians["memcpy"]) / 2
    return [_row(name, tensor, encode, back, copy) for name, (encode, back) in medians.items()]


def _row(name: str, tensor: torch.Tensor, encode: float, back: float, copy: float) -> dict[str, object]:
    row: dict[str, object] = {"codec": name, "encode_GB_per_s": tensor.nbytes / encode / 1e9, "decode_GB_per_s": tensor.nbytes / back / 1e9}
    row |= {"encode_of_memcpy": copy / encode, "decode_of_memcpy": copy / back, "memory_passes": 2 * (encode + back) / copy}
    if name in ("memcpy", "naive int8"):
        return row
    encoded = make_codec(name).encode(tensor)
    link = {"ratio": encoded.ratio, "feeds_Gbit_per_s": 8 * encoded.nbytes / max(encode, back) / 1e9}
    return row | link | {"relative_error": relative_error(tensor, decode(encoded))}


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    rows = measure(options.megabytes, options.rounds, options.threads)
    if options.json:
        print_json({"codecs": rows, "megabytes": options.megabytes, "rounds": options.rounds, "threads": options.threads})
        return
    columns = ["codec", "encode_GB_per_s", "decode_GB_per_s", "encode_of_memcpy", "decode_of_memcpy"]
    columns += ["memory_passes", "ratio", "feeds_Gbit_per_s", "relative_error"]
    title = f"Codecs on {options.megabytes} MB of fp32, {options.threads} thread(s), medians of {options.rounds} interleaved rounds"
    print_table(title, columns, [[row.get(column, "") for column in columns] for row in rows])


if __name__ == "__main__":
    main()
