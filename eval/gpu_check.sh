#!/usr/bin/env bash
# On a machine with one GPU, in less than 8 minutes: compiles the extension, runs the tests marked gpu, times a
# filtered TinyLlama-1.1B step, and prints one table. Needs torch 2.11 to 2.14 for CUDA, this package
# (pip install -e '.[dev]'), a C++17 compiler and about 40 GB of GPU memory (BATCH=1: 16 GB).
#   PYTHON  interpreter (default: python)      BATCH  sequences of 2,048 tokens (default: 4)
#   OUT     folder for the bench's JSON files and the tests' log (default: a new one in /tmp)
# Exits with 1 when a test or a bench fails.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python} BATCH=${BATCH:-4} OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
rm -f "$OUT"/keep-*.json # of an earlier check: collider bench overwrites nothing
status=0

"$PYTHON" - <<'CHECK' || exit 1
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"gpu_check: torch {torch.__version__} finds no CUDA device")
if torch.cuda.get_device_capability() < (8, 0):
    sys.exit(f"gpu_check: {torch.cuda.get_device_name()} has no bfloat16 (needs compute capability 8.0)")
CHECK

echo "== compiling"
timeout 150 "$PYTHON" -m lightning_collider.cli build || exit 1

echo "== tests marked gpu ($OUT/tests.log)"
timeout 120 "$PYTHON" -m pytest tests/ops/test_gpu.py tests/eval/test_efficiency.py -m gpu \
  -p no:cacheprovider > "$OUT/tests.log" 2>&1 || status=1
grep -E "^(FAILED|ERROR)|passed|failed|error" "$OUT/tests.log" | tail -n 20

bench() {  # NAME KEEP, with the environment given before it
  echo "== bench: $1"
  timeout 50 "$PYTHON" -m lightning_collider.cli bench --device cuda --shape tinyllama --dtype bf16 \
    --seq 2048 --batch "$BATCH" --keep "$2" --rounds 11 --json "$OUT/$1.json" > "$OUT/$1.log" 2>&1 ||
    { status=1; tail -n 5 "$OUT/$1.log"; }
}
bench keep-0.6 0.6
bench keep-0.5 0.5
bench keep-0.3 0.3
LIGHTNING_COLLIDER_TRITON=0 bench keep-0.6-no-triton 0.6

"$PYTHON" - "$OUT" <<'TABLE'
import json, sys
from pathlib import Path

NAMES = "backward_vs_hf step_vs_hf backward_vs_dense floor_backward step_vs_dense floor_step"
NAMES = [*NAMES.split(), "dense_vs_hf", "peak_memory_ratio"]
found = {f.stem: json.loads(f.read_text()) for f in sorted(Path(sys.argv[1]).glob("keep-*.json"))}
print(f"\n{'':20s}" + "".join(f"{name:>20s}" for name in found))
for name in NAMES:
    print(f"{name:20s}" + "".join(f"{r[name]:20.3f}" for r in found.values()))
for kind in ("hf", "dense", "filtered"):
    for part in ("forward", "backward"):
        times = "".join(f"{r[f'{kind}_{part}_s'] * 1e3:20.2f}" for r in found.values())
        print(f"{f'{kind} {part} ms':20s}{times}")
for r in list(found.values())[:1]:
    print("TinyLlama-1.1B, {layers} layers, B={batch}, T={seq}, {dtype}, {rounds} rounds".format(**r))
    print(f"{r['machine']['gpu']}, {r['date']}, {r['versions']}")
TABLE
echo "tests and benches: $([ $status = 0 ] && echo all passed || echo SOME FAILED), files in $OUT"
exit $status
