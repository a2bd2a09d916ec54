// How many leading tokens two sequences share, on the CPU. Knows no tree.
#include <algorithm>
#include <cstring>

#include "check.h"

namespace minisgl {

// Blocks of 256 bytes by memcmp, then the tokens of the one that differs.
inline int64_t common_prefix(TensorView a, TensorView b) {
  Size a_length("length of a"), b_length("length of b");
  Type token("dtype", {int32});
  Device device(kDLCPU);
  Want({a_length}).of(token).on(device).check("a", a);
  Want({b_length}).of(token).on(device).check("b", b);
  const int64_t length = std::min(a_length.value(), b_length.value());
  const int32_t* left = static_cast<const int32_t*>(a.data_ptr());
  const int32_t* right = static_cast<const int32_t*>(b.data_ptr());
  constexpr int64_t block = 64;
  int64_t at = 0;
  while (at + block <= length && std::memcmp(left + at, right + at, block * sizeof(int32_t)) == 0) at += block;
  while (at < length && left[at] == right[at]) ++at;
  return at;
}

}  // namespace minisgl
