// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl.
#include "kernels.hpp"
#include "ops_avx512.hpp"

namespace trimtab {

extern const KernelTable kAvx512Fp32;
const KernelTable kAvx512Fp32 = {"avx512_fp32", WeightFormat::fp32, false, 4, moe<Avx512Fp32>, linear<Avx512Fp32>};

}  // namespace trimtab
