// Compiled with -mavx2 -mfma.
#include "kernels.hpp"
#include "ops_avx2.hpp"

namespace trimtab {

extern const KernelTable kAvx2Fp32;
extern const KernelTable kAvx2Bf16;
extern const KernelTable kAvx2Int8;

const KernelTable kAvx2Fp32 = {"avx2_fp32", WeightFormat::fp32, false, 4, moe<Avx2Fp32>, linear<Avx2Fp32>};
const KernelTable kAvx2Bf16 = {"avx2_bf16", WeightFormat::bf16, false, 4, moe<Avx2Bf16>, linear<Avx2Bf16>};
const KernelTable kAvx2Int8 = {"avx2_int8", WeightFormat::int8, false, 2, moe<Avx2Int8>, linear<Avx2Int8>};

}  // namespace trimtab
