// Copies by the 32 lanes of a warp, in the largest packets that a row allows. Knows no rows but their bytes.
#pragma once

#include <cstdint>

namespace minisgl {

constexpr int lanes = 32;

template <int Bytes>
struct Packet;
template <>
struct Packet<16> {
  using type = uint4;
};
template <>
struct Packet<8> {
  using type = uint2;
};
template <>
struct Packet<4> {
  using type = uint32_t;
};
template <>
struct Packet<2> {
  using type = uint16_t;
};
template <>
struct Packet<1> {
  using type = uint8_t;
};

// All loads before the first store: they are on their way together. In rounds of 8, so that they fit in registers.
template <int Bytes, int PacketBytes>
__device__ __forceinline__ void copy(void* to, const void* from, int lane) {
  using T = typename Packet<PacketBytes>::type;
  static_assert(Bytes % PacketBytes == 0);
  constexpr int packets = Bytes / PacketBytes, each = (packets + lanes - 1) / lanes, round = each < 8 ? each : 8;
  T kept[round];
#pragma unroll 1
  for (int first = 0; first < each; first += round) {
#pragma unroll
    for (int i = 0; i < round; ++i) {
      const int at = (first + i) * lanes + lane;
      if (at < packets) kept[i] = static_cast<const T*>(from)[at];
    }
#pragma unroll
    for (int i = 0; i < round; ++i) {
      const int at = (first + i) * lanes + lane;
      if (at < packets) static_cast<T*>(to)[at] = kept[i];
    }
  }
}

template <int Bytes, int PacketBytes>
__device__ __forceinline__ void clear(void* to, int lane) {
  using T = typename Packet<PacketBytes>::type;
  for (int at = lane; at < Bytes / PacketBytes; at += lanes) static_cast<T*>(to)[at] = T{};
}

// Whether packets may be read at an address and every `stride` bytes from it.
inline bool aligned(const void* data, int64_t stride, int packet) {
  return reinterpret_cast<uintptr_t>(data) % packet == 0 && stride % packet == 0;
}

}  // namespace minisgl
