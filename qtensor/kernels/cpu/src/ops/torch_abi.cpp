// Reads the arguments of ops and makes their results, by the C functions of torch.
#include "torch_abi.h"

#include <new>

#ifdef __GLIBCXX__
// What newer headers of GCC's C++ library call for too large an array. Older libraries lack it, and a wheel
// has to load with them.
namespace std {
void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std
#endif

namespace ops {

Torch torch;

namespace {

constexpr int MOST_CODES = 128;
signed char types[MOST_CODES];  // code of torch -> TensorType + 1, or 0
i32 codes[TYPES];
i32 cpu, strided;

// In the order of TensorType.
const char* const TYPE_FUNCTIONS[TYPES] = {"aoti_torch_dtype_float32",       "aoti_torch_dtype_bfloat16",
                                           "aoti_torch_dtype_float16",       "aoti_torch_dtype_uint8",
                                           "aoti_torch_dtype_float8_e4m3fn", "aoti_torch_dtype_float8_e5m2",
                                           "torch_dtype_float8_e8m0fnu",     "aoti_torch_dtype_int64",
                                           "aoti_torch_dtype_int32",         "aoti_torch_dtype_bool"};

bool call(Find find, void* library, const char* name, i32& number) {
    auto* function = (i32 (*)())find(library, name);
    if (!function) return false;
    number = function();
    return true;
}

void contiguous_strides(const Shape& shape, i64* stride) {
    i64 step = 1;
    for (i64 i = shape.dim; i-- > 0; step *= shape.size[i] > 1 ? shape.size[i] : 1) stride[i] = step;
}

}  // namespace

i64 type_of(i32 code) { return code >= 0 && code < MOST_CODES ? types[code] - 1 : OTHER_TYPE; }

// Finds the functions in libtorch_cpu. Returns the name of one that it lacks, or null.
const char* find_functions(Find find, void* library) {
#define FIND(name, result, arguments) \
    if (!(torch.name = (result(*) arguments)find(library, #name))) return #name;
    TORCH_FUNCTIONS(FIND)
#undef FIND
    torch.delete_value = (Error (*)(Value*))find(library, "torch_delete_stable_ivalue");
    if (!call(find, library, "aoti_torch_device_type_cpu", cpu)) return "aoti_torch_device_type_cpu";
    if (!call(find, library, "aoti_torch_layout_strided", strided)) return "aoti_torch_layout_strided";
    for (int i = 0; i < TYPES; i++) {
        if (!call(find, library, TYPE_FUNCTIONS[i], codes[i])) return TYPE_FUNCTIONS[i];
        if (codes[i] < 0 || codes[i] >= MOST_CODES) return TYPE_FUNCTIONS[i];
        types[codes[i]] = (signed char)(i + 1);
    }
    return nullptr;
}

// ---- tensors

bool Tensor::read(Handle tensor) {
    handle = tensor;
    i32 device, layout, code;
    if (torch.aoti_torch_get_device_type(tensor, &device) || device != cpu) return false;
    if (torch.aoti_torch_get_layout(tensor, &layout) || layout != strided) return false;
    i64 dims, *sizes, *strides, bytes, first;
    check(torch.aoti_torch_get_dtype(tensor, &code));
    check(torch.aoti_torch_get_dim(tensor, &dims));
    dtype = type_of(code);
    if (dtype == OTHER_TYPE || dims > MAX_DIM) return false;
    check(torch.aoti_torch_get_sizes(tensor, &sizes));
    check(torch.aoti_torch_get_strides(tensor, &strides));
    check(torch.aoti_torch_get_storage_size(tensor, &bytes));
    check(torch.aoti_torch_get_storage_offset(tensor, &first));
    shape = Shape(dims, sizes);
    std::copy_n(strides, dims, stride);
    look_at_strides();
    i64 end = first + 1;
    for (i64 i = 0; i < dims; i++) {
        if (sizes[i] == 0) return true;
        end += (sizes[i] - 1) * strides[i];
    }
    // The memory may have been freed, or cut, behind the tensor.
    if (end * BYTES[dtype] > bytes) return false;
    return torch.torch_get_const_data_ptr(tensor, &data) == 0 && data;
}

void Tensor::look_at_strides() {
    contiguous = true;
    i64 step = 1;
    for (i64 i = shape.dim; i-- > 0; step *= shape.size[i])
        if (shape.size[i] != 1 && stride[i] != step) contiguous = false;
}

void* Tensor::writable() const {
    void* address = nullptr;
    return torch.torch_get_mutable_data_ptr(handle, &address) ? nullptr : address;
}

// ---- arguments

// A list holds the handles of its tensors, and does not delete them.
static void delete_list(void* list, bool of_tensors) {
    size_t count = 0;
    if (of_tensors) torch.torch_list_size(list, &count);
    for (size_t i = 0; i < count; i++) {
        Value element;
        if (torch.torch_list_get_item(list, i, &element) == 0)
            torch.aoti_torch_delete_tensor_object((Handle)element);
    }
    torch.torch_delete_list(list);
}

void Arguments::release() const {
    for (int i = 0; kinds_[i]; i++) {
        Value value = stack_[i];
        char kind = kinds_[i];
        if (kind == 'o' || kind == 'p') {
            if (!value) continue;
            auto* box = (Value*)value;
            value = *box;
            kind = kind == 'o' ? 't' : 'l';
            if (torch.delete_value)
                torch.delete_value(box);
            else
                delete box;
        }
        if (kind == 't') torch.aoti_torch_delete_tensor_object((Handle)value);
        if (kind == 'l' || kind == 'n') delete_list((void*)value, kind == 'l');
        if (kind == 's') torch.torch_delete_string((void*)value);
    }
}

double Arguments::number(int i) const {
    double value;
    memcpy(&value, stack_ + i, sizeof value);
    return value;
}

std::string_view Arguments::text(int i) const {
    size_t length;
    const char* start;
    check(torch.torch_string_length((void*)stack_[i], &length));
    check(torch.torch_string_c_str((void*)stack_[i], &start));
    return {start, length};
}

void* Arguments::list(int i, size_t& count) const {
    auto* list = (void*)(kinds_[i] == 'p' ? *(Value*)stack_[i] : stack_[i]);
    check(torch.torch_list_size(list, &count));
    return list;
}

bool Arguments::tensors(int i, std::vector<Tensor>& found) const {
    size_t count;
    void* from = list(i, count);
    found.resize(count);
    for (size_t k = 0; k < count; k++) {
        Value element;
        check(torch.torch_list_get_item(from, k, &element));
        if (!found[k].read((Handle)element)) return false;
    }
    return true;
}

std::vector<Value> Arguments::numbers(int i) const {
    size_t count;
    void* from = list(i, count);
    std::vector<Value> found(count);
    for (size_t k = 0; k < count; k++) check(torch.torch_list_get_item(from, k, &found[k]));
    return found;
}

bool Arguments::shape(int i, Shape& s) const {
    const std::vector<Value> sizes = numbers(i);
    if (sizes.size() > size_t(MAX_DIM)) return false;
    s = Shape(i64(sizes.size()), (const i64*)sizes.data());
    i64 count = 1;
    for (i64 d = 0; d < s.dim; d++) {
        if (s.size[d] < 1 || s.size[d] > MOST_ELEMENTS / count) return false;
        count *= s.size[d];
    }
    return true;
}

// ---- new tensors

Tensors::~Tensors() {
    for (Handle handle : handles_)
        if (handle) torch.aoti_torch_delete_tensor_object(handle);
}

void* Tensors::add(const Shape& shape, i64 dtype) {
    i64 stride[MAX_DIM];
    contiguous_strides(shape, stride);
    Handle handle;
    check(torch.aoti_torch_empty_strided(shape.dim, shape.size, stride, codes[dtype], cpu, 0, &handle));
    handles_.push_back(handle);
    void* address;
    check(torch.torch_get_mutable_data_ptr(handle, &address));
    return address;
}

void Tensors::add_view(const void* data, i64 rows, i64 cols, bool by_columns) {
    const i64 size[2] = {rows, cols}, stride[2] = {by_columns ? 1 : cols, by_columns ? rows : 1};
    Handle handle;
    check(torch.aoti_torch_create_tensor_from_blob((void*)data, 2, size, stride, 0, codes[FLOAT32], cpu, 0,
                                                   &handle));
    handles_.push_back(handle);
}

Handle Tensors::take(size_t i) {
    Handle handle = handles_[i];
    handles_[i] = nullptr;
    return handle;
}

Value Tensors::take_list() {
    void* list;
    check(torch.torch_new_list_reserve_size(handles_.size(), &list));
    for (size_t i = 0; i < handles_.size(); i++) check(torch.torch_list_push_back(list, (Value)take(i)));
    return (Value)list;
}

}  // namespace ops
