"""Compiles the Triton kernels for one GPU architecture, which needs no GPU: ``python FILE 90``."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_collider.ops import triton_kernels

CONSTANTS = {
    "_dropped_keys": {"QUERIES": 64, "KEYS": 64, "DIMS": 64},
    "_rotate": {"INVERSE": True, "HEADS": 32, "HALF": 32},
    "_swiglu_backward": {"GATHER": True, "BLOCK": 1024},
    "_rms_backward": {"GATHER": True, "BLOCK": 2048},
}
FLOAT32 = {"lse_ptr", "rstd_ptr", "cos_ptr", "sin_ptr", "partial_ptr"}
INT64 = {"dropped_ptr", "first_ptr", "last_ptr", "rows_ptr"}


def type_of(name, constants):
    """Triton's name of an argument's type."""
    if name in constants:
        return "constexpr"
    if name.endswith("_ptr"):
        return "*fp32" if name in FLOAT32 else "*i64" if name in INT64 else "*bf16"
    return "fp32" if name == "scale" else "i32"


def main(architecture):
    target = GPUTarget("cuda", architecture, 32)
    for name, constants in CONSTANTS.items():
        kernel = getattr(triton_kernels, name)
        signature = {argument: type_of(argument, constants) for argument in kernel.arg_names}
        source = ASTSource(kernel, signature, constants)
        print(name, len(triton.compile(source, target=target).asm["cubin"]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
