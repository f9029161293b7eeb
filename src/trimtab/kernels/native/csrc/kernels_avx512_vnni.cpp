// Compiled with -mavx512vnni on top of kernels_avx512.cpp's flags.
#include "kernels.hpp"
#include "ops_avx512.hpp"

namespace trimtab {

extern const KernelTable kAvx512Int8;
const KernelTable kAvx512Int8 = {"avx512_vnni", WeightFormat::int8, false, 1, moe<Avx512Int8>, linear<Avx512Int8>};

}  // namespace trimtab
