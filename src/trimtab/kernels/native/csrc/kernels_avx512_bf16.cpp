// Compiled with -mavx512bf16 on top of kernels_avx512.cpp's flags.
#include "kernels.hpp"
#include "ops_avx512.hpp"

namespace trimtab {

extern const KernelTable kAvx512Bf16;
const KernelTable kAvx512Bf16 = {"avx512_bf16", WeightFormat::bf16, true, 2, moe<Avx512Bf16>, linear<Avx512Bf16>};

}  // namespace trimtab
