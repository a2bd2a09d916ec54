// What a tensor must be, said as shapes with names in them. Knows no kernel.
//
//   Size tokens("tokens"), dim("dim"), apart("token stride");
//   Type element("element type");
//   Device device(kDLCUDA);
//   Want({tokens, dim}).strides({apart, 1}).of(element).on(device).check("k", k).check("v", v);
//
// A name is bound by the first tensor that has it, and every later one has to agree. What disagrees raises a ValueError
// with this file's and the check's place, both values, and which tensor gave the other one.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace minisgl {

using tvm::ffi::TensorView;

// Where a check was written: its default argument is evaluated at the call.
struct Place {
  const char* file;
  int line;
  static Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

[[noreturn]] inline void refuse(Place place, const std::string& what) {
  std::string file = place.file;
  TVM_FFI_THROW(ValueError) << file.substr(file.rfind('/') + 1) << ":" << place.line << ": " << what;
  __builtin_unreachable();
}

inline void require(bool holds, const char* what, Place place = Place::here()) {
  if (!holds) refuse(place, what);
}

// A few values without a trip to the heap: checks are made at every launch.
template <typename T>
class Few {
 public:
  Few() = default;
  Few(std::initializer_list<T> values) {
    require(values.size() <= 6, "more than 6 dimensions or dtypes");
    for (const T& value : values) values_[size_++] = value;
  }
  int64_t size() const { return size_; }
  const T* begin() const { return values_; }
  const T* end() const { return values_ + size_; }
  const T& operator[](int64_t i) const { return values_[i]; }

 private:
  T values_[6]{};
  int64_t size_ = 0;
};

// A number that the tensors decide: a size or a stride.
class Size {
 public:
  explicit Size(const char* name) : name(name) {}
  int64_t value(Place place = Place::here()) const {
    if (!from) refuse(place, std::string(name) + " is asked for before a tensor was checked that has it");
    return bound;
  }
  const char* const name;
  int64_t bound = 0;
  const char* from = nullptr;  // the tensor that bound it
};

// One entry of a shape: a number, a name, or anything.
struct Entry {
  Entry() = default;
  Entry(int64_t number) : number(number) {}
  Entry(int number) : number(number) {}
  Entry(Size& size) : size(&size) {}
  int64_t number = 0;
  Size* size = nullptr;
};
constexpr int64_t any = -1;

inline std::string words(DLDataType type) { return tvm::ffi::DLDataTypeToString(type); }
inline std::string words(DLDevice device) {
  std::string kind = device.device_type == kDLCPU    ? "cpu"
                     : device.device_type == kDLCUDA ? "cuda"
                                                     : "device type " + std::to_string(device.device_type);
  return device.device_type == kDLCPU ? kind : kind + ":" + std::to_string(device.device_id);
}
inline bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

constexpr DLDataType int32{kDLInt, 32, 1};
constexpr DLDataType int64{kDLInt, 64, 1};

// A dtype that the tensors decide, among those allowed (none given: any).
class Type {
 public:
  explicit Type(const char* name, std::initializer_list<DLDataType> allowed = {}) : name(name), allowed(allowed) {}
  DLDataType value() const { return bound; }
  int64_t bytes() const { return (bound.bits * bound.lanes + 7) / 8; }
  const char* const name;
  const Few<DLDataType> allowed;
  DLDataType bound{};
  const char* from = nullptr;
};

// The one device of all tensors, of a kind that is known beforehand.
class Device {
 public:
  explicit Device(DLDeviceType kind) : kind(kind) {}
  DLDevice value() const { return bound; }
  const DLDeviceType kind;
  DLDevice bound{};
  const char* from = nullptr;
};

class Want {
 public:
  explicit Want(Few<Entry> shape) : shape_(shape) {}

  // Strides in elements. The stride of a size of 1 may be anything: nothing is reached by it.
  Want& strides(Few<Entry> strides) {
    strides_ = strides;
    return *this;
  }
  Want& of(Type& type) {
    type_ = &type;
    return *this;
  }
  Want& on(Device& device) {
    device_ = &device;
    return *this;
  }

  const Want& check(const char* name, TensorView tensor, Place place = Place::here()) const {
    const int64_t rank = shape_.size();
    if (tensor.ndim() != rank) {
      refuse(place,
             std::string(name) + " has " + std::to_string(tensor.ndim()) + " dimensions, not " + std::to_string(rank));
    }
    for (int64_t i = 0; i < rank; ++i) agree(name, "size", i, shape_[i], tensor.size(i), false, place);
    if (strides_.size() == 0) {
      check_contiguous(name, tensor, place);
    } else {
      for (int64_t i = 0; i < rank; ++i)
        agree(name, "stride", i, strides_[i], tensor.stride(i), tensor.size(i) <= 1, place);
    }
    if (type_) check_type(name, tensor.dtype(), place);
    if (device_) check_device(name, tensor.device(), place);
    return *this;
  }

 private:
  static void agree(const char* tensor, const char* what, int64_t i, const Entry& entry, int64_t value, bool free,
                    Place place) {
    if (!entry.size) {
      if (entry.number == any || entry.number == value || free) return;
      refuse(place, which(tensor, what, i) + " is " + std::to_string(value) + ", not " + std::to_string(entry.number));
    }
    Size& size = *entry.size;
    if (!size.from) {
      size.bound = value;
      size.from = tensor;
    } else if (size.bound != value && !free) {
      refuse(place, which(tensor, what, i) + " (" + size.name + ") is " + std::to_string(value) + ", and " + size.from +
                        " has " + std::to_string(size.bound));
    }
  }

  static std::string which(const char* tensor, const char* what, int64_t i) {
    return std::string(tensor) + ": " + what + " " + std::to_string(i);
  }

  static void check_contiguous(const char* name, TensorView tensor, Place place) {
    int64_t expected = 1;
    for (int64_t i = tensor.ndim() - 1; i >= 0; --i) {
      agree(name, "stride", i, Entry(expected), tensor.stride(i), tensor.size(i) <= 1, place);
      expected *= tensor.size(i);
    }
  }

  void check_type(const char* name, DLDataType type, Place place) const {
    Type& want = *type_;
    if (want.from) {
      if (same(want.bound, type)) return;
      refuse(place, std::string(name) + ": " + want.name + " is " + words(type) + ", and " + want.from + " has " +
                        words(want.bound));
    }
    bool allowed = want.allowed.size() == 0;
    for (DLDataType each : want.allowed) allowed = allowed || same(each, type);
    if (!allowed) {
      std::string list;
      for (DLDataType each : want.allowed) list += (list.empty() ? "" : " or ") + words(each);
      refuse(place, std::string(name) + ": " + want.name + " is " + words(type) + ", not " + list);
    }
    want.bound = type;
    want.from = name;
  }

  void check_device(const char* name, DLDevice device, Place place) const {
    Device& want = *device_;
    if (device.device_type != want.kind) {
      refuse(place, std::string(name) + " is on " + words(device) + ", not on " + words(DLDevice{want.kind, 0}));
    }
    if (!want.from) {
      want.bound = device;
      want.from = name;
    } else if (want.bound.device_id != device.device_id) {
      refuse(place, std::string(name) + " is on " + words(device) + ", and " + want.from + " on " + words(want.bound));
    }
  }

  Few<Entry> shape_, strides_;
  Type* type_ = nullptr;
  Device* device_ = nullptr;
};

}  // namespace minisgl
