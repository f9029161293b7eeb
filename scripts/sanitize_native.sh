#!/usr/bin/env bash
# Runs the tests of the native kernels, checksums, copies, look-ups and the dispatch between ranks against builds with
# AddressSanitizer and with UndefinedBehaviorSanitizer, and the exchange between ranks under ThreadSanitizer.
# Needs g++ with its sanitizer libraries; PYTHON names the interpreter (default: python).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src:tests/native OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
python="${PYTHON:-python}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

run() {
  local name="$1" library="$2"
  shift 2
  echo "== $name"
  "$python" -m trimtab.kernels.native.build --output "$scratch/$name.so" --optimize=-O1 "${@/#/--flag=}"
  # torch is not instrumented and leaves memory to the process's end: no leak check. Its exceptions end the process
  # unless the C++ library is there when the sanitizer starts and looks for what throws.
  LD_PRELOAD="$(g++ -print-file-name="$library") $(g++ -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1 \
    TRIMTAB_TEST_CORE="$scratch/$name.so" TRIMTAB_TEST_FLAGS="$*" \
    "$python" -m pytest -q -n 0 -p no:cacheprovider -p sanitized_core tests/unit/kernels/test_native_moe.py \
    tests/unit/kernels/test_native_linear.py tests/unit/kernels/test_checksum.py \
    tests/unit/experts/data/test_map_and_record.py tests/contracts/test_dispatcher.py \
    tests/unit/kernels/test_native_emulated.py
}

run address libasan.so -g -fsanitize=address
run undefined libubsan.so -g -fsanitize=undefined -fno-sanitize-recover=all

echo "== thread: the exchange between ranks"
TRIMTAB_TEST_EXCHANGE_LAYERS=20000 "$python" -m pytest -q -p no:cacheprovider tests/unit/kernels/test_exchange_races.py
