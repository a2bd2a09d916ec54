// K and V of new tokens to their slots of the cache. Knows no pages, only slots.
#include "launch.cuh"
#include "warp.cuh"

namespace minisgl {

// One warp copies K's row of a token, or V's.
template <int RowBytes, int PacketBytes, bool Early, typename Index>
__global__ void store_rows(const char* k, const char* v, int64_t k_apart, int64_t v_apart, char* k_cache, char* v_cache,
                           const Index* out_loc, int64_t tokens) {
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / lanes;
  const int64_t token = warp / 2;
  let_next_start<Early>();
  if (token >= tokens) return;
  wait_for_previous<Early>();
  const int64_t slot = out_loc[token];
  const bool is_k = warp % 2 == 0;
  copy<RowBytes, PacketBytes>((is_k ? k_cache : v_cache) + slot * RowBytes,
                              is_k ? k + token * k_apart : v + token * v_apart, threadIdx.x % lanes);
}

// RowBytes: all heads of a token's K. PacketBytes: those of one load.
template <int RowBytes, int PacketBytes, int Threads, bool Early>
struct Store {
  static void run(TensorView k, TensorView v, TensorView k_cache, TensorView v_cache, TensorView out_loc) {
    Size tokens("tokens"), heads("heads"), dim("head_dim"), slots("slots"), k_apart("k's token stride"),
        v_apart("v's token stride");
    Type element("dtype"), index("out_loc's dtype", {int32, int64});
    Device device(kDLCUDA);
    Want({tokens, heads, dim}).strides({k_apart, dim, 1}).of(element).on(device).check("k", k);
    Want({tokens, heads, dim}).strides({v_apart, dim, 1}).of(element).on(device).check("v", v);
    Want({slots, heads, dim}).of(element).on(device).check("k_cache", k_cache).check("v_cache", v_cache);
    Want({tokens}).of(index).on(device).check("out_loc", out_loc);
    const int64_t bytes = element.bytes(), row = heads.value() * dim.value() * bytes;
    if (row != RowBytes)
      refuse(Place::here(), "rows of " + std::to_string(row) + " bytes for a kernel of " + std::to_string(RowBytes));
    const int64_t many = tokens.value() > 1;  // the stride of one token may be anything
    const bool even = aligned(k.data_ptr(), many * k_apart.value() * bytes, PacketBytes) &&
                      aligned(v.data_ptr(), many * v_apart.value() * bytes, PacketBytes) &&
                      aligned(k_cache.data_ptr(), RowBytes, PacketBytes) &&
                      aligned(v_cache.data_ptr(), RowBytes, PacketBytes);
    require(even, "rows of k, v or the cache do not begin at multiples of the bytes of a packet");
    if (tokens.value() == 0) return;
    const auto start = [&](auto* kernel, auto* locations) {
      const unsigned blocks = (tokens.value() * 2 * lanes + Threads - 1) / Threads;
      launch<Early>(kernel, blocks, Threads, device.value(), static_cast<const char*>(k.data_ptr()),
                    static_cast<const char*>(v.data_ptr()), k_apart.value() * bytes, v_apart.value() * bytes,
                    static_cast<char*>(k_cache.data_ptr()), static_cast<char*>(v_cache.data_ptr()), locations,
                    tokens.value());
    };
    if (same(index.value(), int32)) {
      start(store_rows<RowBytes, PacketBytes, Early, int32_t>, static_cast<const int32_t*>(out_loc.data_ptr()));
    } else {
      start(store_rows<RowBytes, PacketBytes, Early, int64_t>, static_cast<const int64_t*>(out_loc.data_ptr()));
    }
  }
};

}  // namespace minisgl
