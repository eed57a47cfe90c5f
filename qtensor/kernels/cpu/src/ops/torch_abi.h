// What the ops use of torch: functions of its stable C interface (torch 2.11 and later), found at run time.
// Neither headers nor libraries of torch are needed to compile this folder, and one library serves every
// version.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "../structs.h"

namespace ops {

using Handle = void*;                                     // AtenTensorHandle
using Value = uint64_t;                                   // StableIValue: an argument or a result of an op
using Error = int32_t;                                    // 0 or a failure
using Find = void* (*)(void* library, const char* name);  // dlsym, which Python hands over
using Boxed = void (*)(Value* stack, uint64_t arguments, uint64_t results);

#define TORCH_FUNCTIONS(F)                                                                       \
    F(aoti_torch_get_dtype, Error, (Handle, i32*))                                               \
    F(aoti_torch_get_dim, Error, (Handle, i64*))                                                 \
    F(aoti_torch_get_sizes, Error, (Handle, i64**))                                              \
    F(aoti_torch_get_strides, Error, (Handle, i64**))                                            \
    F(aoti_torch_get_device_type, Error, (Handle, i32*))                                         \
    F(aoti_torch_get_layout, Error, (Handle, i32*))                                              \
    F(aoti_torch_get_storage_size, Error, (Handle, i64*))                                        \
    F(aoti_torch_get_storage_offset, Error, (Handle, i64*))                                      \
    F(torch_get_const_data_ptr, Error, (Handle, const void**))                                   \
    F(torch_get_mutable_data_ptr, Error, (Handle, void**))                                       \
    F(aoti_torch_empty_strided, Error, (i64, const i64*, const i64*, i32, i32, i32, Handle*))    \
    F(aoti_torch_create_tensor_from_blob, Error,                                                 \
      (void*, i64, const i64*, const i64*, i64, i32, i32, i32, Handle*))                         \
    F(aoti_torch_delete_tensor_object, Error, (Handle))                                          \
    F(aoti_torch_copy_, Error, (Handle, Handle, i32))                                            \
    F(aoti_torch_cpu_mm_out, Error, (Handle, Handle, Handle))                                    \
    F(torch_new_list_reserve_size, Error, (size_t, void**))                                      \
    F(torch_list_push_back, Error, (void*, Value))                                               \
    F(torch_list_size, Error, (void*, size_t*))                                                  \
    F(torch_list_get_item, Error, (void*, size_t, Value*))                                       \
    F(torch_delete_list, Error, (void*))                                                         \
    F(torch_string_length, Error, (void*, size_t*))                                              \
    F(torch_string_c_str, Error, (void*, const char**))                                          \
    F(torch_delete_string, Error, (void*))                                                       \
    F(torch_get_num_threads, Error, (u32*))                                                      \
    F(aoti_torch_grad_mode_is_enabled, bool, ())                                                 \
    F(aoti_torch_library_init_impl, Error, (const char*, const char*, const char*, u32, void**)) \
    F(torch_library_impl, Error, (void*, const char*, Boxed, uint64_t))                          \
    F(torch_call_dispatcher, Error, (const char*, const char*, Value*, uint64_t))                \
    F(aoti_torch_check, void, (bool, const char*, const char*, u32, const char*))

struct Torch {
#define DECLARE(name, result, arguments) result(*name) arguments;
    TORCH_FUNCTIONS(DECLARE)
#undef DECLARE
    Error (*delete_value)(Value*);  // torch 2.13 and later; null before
};
extern Torch torch;
constexpr uint64_t ABI_VERSION = (2ull << 56) | (11ull << 48);  // of torch 2.11

// The dtypes that the ops know. The first three are those of the kernels (structs.h).
enum TensorType {
    FLOAT32,
    BFLOAT16,
    FLOAT16,
    UINT8,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT8_E8M0,
    INT64,
    INT32,
    BOOL,
    TYPES
};
constexpr i64 OTHER_TYPE = -1;
constexpr i64 BYTES[TYPES] = {4, 2, 2, 1, 1, 1, 1, 8, 4, 1};
inline bool is_float(i64 dtype) { return dtype >= FLOAT32 && dtype <= FLOAT16; }
i64 type_of(i32 code);  // TensorType of a dtype of torch, or OTHER_TYPE

constexpr i64 MAX_DIM = 12;
constexpr i64 MOST_ELEMENTS = i64(1) << 40;

struct Shape {
    i64 dim = 0, size[MAX_DIM];
    Shape() = default;
    Shape(i64 rows, i64 cols) : dim(2), size{rows, cols} {}
    static Shape vector(i64 count) { return Shape(1, &count); }
    Shape(i64 dims, const i64* sizes) : dim(dims) { std::copy_n(sizes, dims, size); }
    i64 elements() const {
        i64 count = 1;
        for (i64 i = 0; i < dim; i++) count *= size[i];
        return count;
    }
    i64 cols() const { return dim ? size[dim - 1] : 1; }
    i64 rows() const {  // of the (M, K) view
        i64 count = 1;
        for (i64 i = 0; i + 1 < dim; i++) count *= size[i];
        return count;
    }
    bool operator==(const Shape& o) const {
        return dim == o.dim && memcmp(size, o.size, size_t(dim) * sizeof(i64)) == 0;
    }
};

// A dense tensor on the CPU, as its owner passed it.
struct Tensor {
    Handle handle = nullptr;
    i64 dtype = OTHER_TYPE;
    Shape shape;
    i64 stride[MAX_DIM];
    const void* data = nullptr;
    bool contiguous = false;

    // Returns false if the ops do not read such a tensor.
    bool read(Handle tensor);
    bool is(i64 type) const { return dtype == type && contiguous; }
    bool is_vector(i64 type, i64 count) const { return is(type) && shape.dim == 1 && shape.size[0] == count; }
    bool is_one(i64 type) const { return is(type) && shape.elements() == 1; }
    // The address for writing; null if there is none.
    void* writable() const;
    // Sets `contiguous` from the strides.
    void look_at_strides();
};

// The arguments of a call, which its kernel owns. `kinds` has a letter for each: t tensor, o optional tensor,
// l list of tensors, p optional list of tensors, s string, n list of numbers, w one word (int, bool, float,
// dtype).
class Arguments {
    Value* const stack_;
    const char* const kinds_;
    void* list(int i, size_t& count) const;

public:
    Arguments(Value* stack, const char* kinds) : stack_(stack), kinds_(kinds) {}
    Arguments(const Arguments&) = delete;
    void release() const;  // deletes the arguments of a call that has been served

    i64 word(int i) const { return i64(stack_[i]); }
    bool flag(int i) const { return (stack_[i] & 0xff) != 0; }
    double number(int i) const;
    i64 dtype(int i) const { return type_of(i32(stack_[i])); }
    bool has(int i) const { return stack_[i] != 0; }  // an optional argument
    Handle handle(int i) const { return (Handle)(kinds_[i] == 'o' ? *(Value*)stack_[i] : stack_[i]); }
    bool tensor(int i, Tensor& t) const { return t.read(handle(i)); }
    std::string_view text(int i) const;
    bool tensors(int i, std::vector<Tensor>& list) const;
    std::vector<Value> numbers(int i) const;
    bool shape(int i, Shape& s) const;  // false for one without elements
};

// New tensors: the results of a call until they are on the stack, or temporary ones.
class Tensors {
    std::vector<Handle> handles_;

public:
    Tensors() { handles_.reserve(16); }
    ~Tensors();
    Tensors(const Tensors&) = delete;
    // A contiguous tensor. Returns its address.
    void* add(const Shape& shape, i64 dtype);
    // A matrix of floats over memory of the caller.
    void add_view(const void* data, i64 rows, i64 cols, bool by_columns);
    Handle last() const { return handles_.back(); }
    Handle take(size_t i);
    Value take_list();
};

struct Failed {};  // a function of torch has failed
inline void check(Error error) {
    if (error) throw Failed();
}

}  // namespace ops
