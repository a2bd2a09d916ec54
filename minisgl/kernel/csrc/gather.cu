// Rows of a table by their numbers, zeros for those that are not here. Knows no vocabulary.
#include "launch.cuh"
#include "warp.cuh"

namespace minisgl {

// One warp copies one of the `Splits` parts of a row.
template <int RowBytes, int PacketBytes, int Splits, bool Early, typename Index>
__global__ void gather_rows(const char* table, int64_t rows, const Index* ids, int64_t first, char* out,
                            int64_t count) {
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / lanes;
  const int64_t i = warp / Splits, part = warp % Splits * (RowBytes / Splits);
  const int lane = threadIdx.x % lanes;
  let_next_start<Early>();
  if (i >= count) return;
  wait_for_previous<Early>();
  const int64_t row = int64_t{ids[i]} - first;
  char* to = out + i * RowBytes + part;
  if (row >= 0 && row < rows) {
    copy<RowBytes / Splits, PacketBytes>(to, table + row * RowBytes + part, lane);
  } else {
    clear<RowBytes / Splits, PacketBytes>(to, lane);
  }
}

template <int RowBytes, int PacketBytes, int Splits, int Threads, bool Early>
struct Gather {
  static_assert(RowBytes % (Splits * PacketBytes) == 0);

  // Row `ids[i] - first` of the table to row i of out.
  static void run(TensorView table, TensorView ids, int64_t first, TensorView out) {
    Size rows("rows"), width("width"), count("ids");
    Type element("dtype"), index("ids' dtype", {int32, int64});
    Device device(kDLCUDA);
    Want({rows, width}).of(element).on(device).check("table", table);
    Want({count}).of(index).on(device).check("ids", ids);
    Want({count, width}).of(element).on(device).check("out", out);
    const int64_t row = width.value() * element.bytes();
    if (row != RowBytes)
      refuse(Place::here(), "rows of " + std::to_string(row) + " bytes for a kernel of " + std::to_string(RowBytes));
    require(aligned(table.data_ptr(), RowBytes, PacketBytes) && aligned(out.data_ptr(), RowBytes, PacketBytes),
            "rows of the table or of out do not begin at multiples of the bytes of a packet");
    if (count.value() == 0) return;
    const auto start = [&](auto* kernel, auto* numbers) {
      const unsigned blocks = (count.value() * Splits * lanes + Threads - 1) / Threads;
      launch<Early>(kernel, blocks, Threads, device.value(), static_cast<const char*>(table.data_ptr()), rows.value(),
                    numbers, first, static_cast<char*>(out.data_ptr()), count.value());
    };
    if (same(index.value(), int32)) {
      start(gather_rows<RowBytes, PacketBytes, Splits, Early, int32_t>, static_cast<const int32_t*>(ids.data_ptr()));
    } else {
      start(gather_rows<RowBytes, PacketBytes, Splits, Early, int64_t>, static_cast<const int64_t*>(ids.data_ptr()));
    }
  }
};

}  // namespace minisgl
