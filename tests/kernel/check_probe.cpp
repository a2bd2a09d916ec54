// Checks of a paged cache as store.cu has them, on the CPU: for test_check.py, which reads line numbers from this file.
#include "check.h"

using namespace minisgl;

inline int64_t probe(TensorView k, TensorView v, TensorView cache, TensorView out_loc) {
  Size tokens("tokens"), dim("dim"), apart("token stride"), slots("slots"), never("never bound");
  Type element("dtype"), index("out_loc's dtype", {minisgl::int32, minisgl::int64});
  Device device(kDLCPU);
  Want({tokens, dim}).strides({apart, 1}).of(element).on(device).check("k", k).check("v", v);  // line: k and v
  Want({slots, dim}).of(element).on(device).check("cache", cache);                             // line: cache
  Want({tokens}).of(index).on(device).check("out_loc", out_loc);                               // line: out_loc
  require(tokens.value() < 100, "more than 99 tokens");                                        // line: require
  if (tokens.value() == 99) return never.value();                                              // line: never
  return apart.value() * 1000 + element.bytes();
}

inline void on_gpu(TensorView x) {
  Device device(kDLCUDA);
  Want({any}).on(device).check("x", x);  // line: gpu
}
