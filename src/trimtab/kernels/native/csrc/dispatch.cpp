// Which kernels exist and which of them this CPU can run.
#include "core.hpp"

namespace trimtab {

extern const KernelTable kAvx2Fp32;
extern const KernelTable kAvx2Bf16;
extern const KernelTable kAvx2Int8;
extern const KernelTable kAvx512Fp32;
extern const KernelTable kAvx512Bf16;
extern const KernelTable kAvx512Int8;

const KernelTable* find_kernels(Level level, WeightFormat format) {
  const bool wide = level == Level::avx512;
  switch (format) {
    case WeightFormat::fp32: return wide ? &kAvx512Fp32 : &kAvx2Fp32;
    case WeightFormat::bf16: return wide ? &kAvx512Bf16 : &kAvx2Bf16;
    case WeightFormat::int8: return wide ? &kAvx512Int8 : &kAvx2Int8;
  }
  return nullptr;
}

bool cpu_supports(Level level, WeightFormat format) {
  // The compiler's run-time also asks whether the operating system saves the wide registers.
  __builtin_cpu_init();
  if (level == Level::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#ifdef TRIMTAB_EMULATED_AVX512
  (void)format;
  return true;
#else
  const bool base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  switch (format) {
    case WeightFormat::fp32: return base;
    case WeightFormat::bf16: return base && __builtin_cpu_supports("avx512bf16");
    case WeightFormat::int8: return base && __builtin_cpu_supports("avx512vnni");
  }
  return false;
#endif
}

}  // namespace trimtab
