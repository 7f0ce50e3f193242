"""Our CUDA kernels timed beside what PyTorch has, or compiled without a device to see if they fit.

    python -m benchmarks.kernels                        # attention and norm, on this CUDA device
    python -m benchmarks.kernels --heads 16 --size 32   # of another shape
    python -m benchmarks.kernels --compile              # no device needed: registers, memory

Attention at dropout 0 is timed beside `varlen_attn` and, on padded rows, PyTorch's SDPA; with
dropout, which varlen_attn has not, beside SDPA alone. SDPA is given its rows padded already and its
mask made, for nothing. The norm (residual + dropout + LayerNorm) is timed beside the same in plain
PyTorch, as it is and compiled. Times are medians, forward and backward together.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.data.errors import BadInput
from xformer.start import run

TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HEAD_SIZES = (16, 24, 32, 48, 64, 96, 128)
WIDTHS = (384, 768, 1024, 4096, 8192)
ARCHITECTURES = (80, 90)  # A100, H100 and H200
# Bytes of shared memory that a program may have on the devices that have least of it (sm_86,
# sm_89, sm_120); an A100 has 163 KiB, an H100 227.
LARGEST_SHARED = 99 * 1024

Case = tuple[int, str, int, bool]  # architecture, type, head size or width, dropout

# ------------------------------------------------------------------------------------ without a GPU


class Compiled(NamedTuple):
    """A kernel as the compiler leaves it."""

    kernel: str
    architecture: str
    type: str
    width: int  # head size, or width of a row
    dropout: bool
    warps: int
    registers: int  # a thread
    spilled: int  # bytes a thread: what did not fit into registers
    shared: int  # bytes a program


def missing_compiler() -> str | None:
    """What keeps kernels from being compiled here, or None."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, with which Triton compiles nothing"
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    for name in ("ptxas", "cuobjdump"):
        if not (_tools(triton) / name).is_file():
            return f"this Triton comes without {name}"
    return None


def _tools(triton: Any) -> Path:
    return Path(triton.__file__).parent / "backends/nvidia/bin"


def attention_kernels(
    architecture: int, name: str, size: int, dropout: bool
) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """(kernel, its constants, type of each array) of each attention kernel."""
    import triton.language as tl

    from xformer.model import kernels

    dot = tl.float32 if name == "fp32" else tl.bfloat16
    options = kernels.tiles(TYPES[name], size, architecture >= 90)
    constants = {**options, "D": size, "DROPOUT": dropout, "DOT": dot}
    arrays = dict.fromkeys(("qkv", "o", "do", "dqkv"), f"*{name}")
    arrays |= {"log_sum": "*fp32", "delta": "*fp32", "cu_seqlens": "*i32"}
    for kernel in (kernels._forward_kernel, kernels._dq_kernel, kernels._dkdv_kernel):
        yield kernel, constants, arrays


def norm_kernels(
    architecture: int, name: str, width: int, dropout: bool
) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """The same of the norm's kernels; a residual is float32, as under autocast."""
    from xformer.model import norm_kernels as kernels

    constants = {**kernels.tiles(width), "DROPOUT": dropout, "HAS_DZ": True}
    names = ("residual", "weight", "bias", "y", "z", "dy", "dz", "mean", "inverse")
    arrays = dict.fromkeys((*names, "dresidual", "dweight", "dbias"), "*fp32")
    arrays |= {"x": f"*{name}", "dx": f"*{name}"}
    for kernel in (kernels._forward_kernel, kernels._backward_kernel):
        yield kernel, constants, arrays


def compile_all(attention: Iterable[Case], norm: Iterable[Case]) -> Iterator[Compiled]:
    """Compile every kernel of these cases ahead of time, as it would be launched."""
    for kernels_of, cases in ((attention_kernels, attention), (norm_kernels, norm)):
        for case in cases:
            for kernel, constants, arrays in kernels_of(*case):
                yield _compile(kernel, constants, arrays, *case)


def _compile(
    kernel: Any,
    constants: dict[str, Any],
    arrays: dict[str, str],
    architecture: int,
    name: str,
    width: int,
    dropout: bool,
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constexprs, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            constexprs[(i,)] = constants[argument]
            continue
        real = argument in ("scale", "scale_log2", "keep_scale", "eps")
        signature[argument] = arrays.get(argument, "fp32" if real else "i32")
        if argument in arrays:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {key: constants[key] for key in ("num_warps", "num_stages") if key in constants}
    done = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_tools(triton) / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, spilled = (int(re.findall(rf"{k}:(\d+)", usage)[0]) for k in ("REG", "STACK"))
    return Compiled(
        f"{kernel.__module__.split('.')[-1]}.{kernel.__name__}",
        f"sm_{architecture}",
        name,
        width,
        dropout,
        options["num_warps"],
        registers,
        spilled,
        done.metadata.shared,
    )


def compile_table() -> None:
    """Print what the compiler reports; raises BadInput if something does not fit a device."""
    reason = missing_compiler()
    if reason:
        raise BadInput(f"--compile: {reason}")
    import triton

    print(f"Triton {triton.__version__}, compiled ahead of time\n")
    print("| kernel | device | type | width | dropout | warps | registers | spilled | shared KiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    worst = 0
    attention, norm = (
        product(ARCHITECTURES, TYPES, sizes, (True, False)) for sizes in (HEAD_SIZES, WIDTHS)
    )
    for row in compile_all(attention, norm):
        worst = max(worst, row.shared)
        *cells, shared = row
        print("|", " | ".join(map(str, cells)), f"| {shared / 1024:.1f} |", flush=True)
    print(f"\nThe most shared memory: {worst / 1024:.1f} KiB of {LARGEST_SHARED // 1024}.")
    if worst > LARGEST_SHARED:
        raise BadInput(f"a kernel takes {worst} bytes of shared memory, over {LARGEST_SHARED}")


# --------------------------------------------------------------------------------------- on a GPU


def mixes(tokens: int) -> dict[str, list[int]]:
    """Sequence lengths that add up to about `tokens`."""
    generator = torch.Generator().manual_seed(0)
    lines = (torch.randn(tokens, generator=generator) * 0.7 + 3.6).exp().int().clamp(3, 512)
    short = int((lines.cumsum(0) < tokens).sum())
    return {
        "rows of 512": [512] * (tokens // 512),
        "rows of 128": [128] * (tokens // 128),
        "lines, mean 47": lines[:short].tolist(),
        "one of 2048, then 16": [2048] + [16] * ((tokens - 2048) // 16),
    }


def milliseconds(outputs: Callable[[], Tensor], inputs: list[Tensor]) -> float:
    """The median time of a forward and a backward pass."""
    from triton.testing import do_bench

    gradient = torch.randn_like(outputs())
    return do_bench(lambda: torch.autograd.grad(outputs(), inputs, gradient), return_mode="median")


def attention_ways(
    lengths: list[int], heads: int, size: int, dtype: torch.dtype, dropout: float
) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """The ways to compute attention over a packed batch, with the tensors they differentiate."""
    from xformer.model.kernels import packed_attention

    device = torch.device("cuda")
    longest, tokens = max(lengths), sum(lengths)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    qkv = torch.randn(tokens, 3, heads, size, device=device, dtype=dtype, requires_grad=True)
    padded = torch.zeros(3, len(lengths), heads, longest, size, device=device, dtype=dtype)
    there = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
    padded.transpose(2, 3)[:, there] = qkv.detach().transpose(0, 1)
    padded.requires_grad_()
    mask = None if min(lengths) == longest else there[:, None, None]

    def ours() -> Tensor:
        return packed_attention(qkv, bounds, longest, dropout, seed=7)

    def sdpa() -> Tensor:
        q, k, v = padded.unbind(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)

    ways = {"ours": (ours, [qkv]), "SDPA, padded": (sdpa, [padded])}
    if dropout == 0 and dtype == torch.bfloat16:
        from torch.nn.attention.varlen import varlen_attn

        def varlen() -> Tensor:
            q, k, v = qkv.unbind(1)
            out = varlen_attn(q, k, v, bounds, bounds, longest, longest)
            assert isinstance(out, Tensor)
            return out

        ways["varlen_attn"] = (varlen, [qkv])
    if dropout == 0:
        expected = sdpa().transpose(1, 2)[there]
        for name in ways.keys() - {"SDPA, padded"}:
            torch.testing.assert_close(ways[name][0](), expected, atol=3e-2, rtol=3e-2)
    return ways


def norm_ways(
    tokens: int, width: int, dtype: torch.dtype, dropout: float
) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """The ways to compute LayerNorm(residual + dropout(x)); the residual is float32."""
    from xformer.model.norm_kernels import add_norm

    x = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    residual = torch.randn(tokens, width, device="cuda", requires_grad=True)
    weight, bias = (torch.randn(width, device="cuda", requires_grad=True) for _ in range(2))
    inputs = [x, residual, weight, bias]

    def plain(p: float = dropout) -> Tensor:
        return F.layer_norm(residual + F.dropout(x, p), (width,), weight, bias, 1e-12)

    def ours(p: float = dropout) -> Tensor:
        return add_norm(x, residual, weight, bias, 1e-12, p, seed=7)[0]

    torch.testing.assert_close(ours(0.0), plain(0.0), atol=1e-4, rtol=1e-4)
    compiled = torch.compile(plain)
    return {"ours": (ours, inputs), "eager": (plain, inputs), "compiled": (compiled, inputs)}


def row(
    name: str, ways: dict[str, tuple[Callable[[], Tensor], list[Tensor]]], columns: tuple[str, ...]
) -> str:
    """A line of a table: every way's time, and which is fastest by how much."""
    times = {way: milliseconds(*ways[way]) for way in columns if way in ways}
    fastest = min(times, key=lambda way: times[way])
    second = min(time for way, time in times.items() if way != fastest)
    cells = [f"{times[way]:.3f}" if way in times else "" for way in columns]
    return f"| {name} | {' | '.join(cells)} | {fastest}, {second / times[fastest]:.2f} times |"


def time_all(heads: int, size: int, tokens: int, dropout: float) -> None:
    """Print both tables; raises BadInput where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise BadInput("no CUDA device here: the kernels can be timed on one only (or --compile)")
    import triton

    torch.backends.cuda.matmul.allow_tf32 = False
    name = torch.cuda.get_device_name()
    print(f"{name}, PyTorch {torch.__version__}, Triton {triton.__version__}.")
    print(f"\nAttention, {tokens:,} tokens, {heads} heads of {size}, ms forward and backward:\n")
    columns: tuple[str, ...] = ("ours", "varlen_attn", "SDPA, padded")
    print(f"| lengths, type, dropout | {' | '.join(columns)} | fastest |\n|---|---|---|---|---|")
    for (kind, dtype), p, (mix, lengths) in product(
        TYPES.items(), (0.0, dropout), mixes(tokens).items()
    ):
        ways = attention_ways(lengths, heads, size, dtype, p)
        print(row(f"{mix}, {kind}, {p:g}", ways, columns), flush=True)
    print(f"\nNorm, {tokens:,} tokens, float32 residual, dropout {dropout:g}, the same:\n")
    columns = ("ours", "eager", "compiled")
    print(f"| width, type | {' | '.join(columns)} | fastest |\n|---|---|---|---|---|")
    for (kind, dtype), width in product(TYPES.items(), WIDTHS):
        print(row(f"{width}, {kind}", norm_ways(tokens, width, dtype, dropout), columns))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="Compile every kernel for an A100 "
        "and an H100 and list what it needs; no device is used.",
    )
    parser.add_argument("--heads", type=int, default=12, help="Heads (default: %(default)s).")
    parser.add_argument("--size", type=int, default=64, help="Head size, 1 to 128 (%(default)s).")
    parser.add_argument("--tokens", type=int, default=32768, help="Tokens (%(default)s).")
    parser.add_argument("--dropout", type=float, default=0.1, help="Dropout (%(default)s).")
    arguments = parser.parse_args()
    for name, least, most in (("heads", 1, 65535), ("size", 1, 128), ("tokens", 4096, 2**22)):
        if not least <= getattr(arguments, name) <= most:
            raise BadInput(f"--{name} must be {least} to {most}, not {getattr(arguments, name)}")
    if not 0 < arguments.dropout < 1:
        raise BadInput(f"--dropout must lie between 0 and 1, not {arguments.dropout}")
    if arguments.compile:
        compile_table()
    else:
        time_all(arguments.heads, arguments.size, arguments.tokens, arguments.dropout)


if __name__ == "__main__":
    run(main)
