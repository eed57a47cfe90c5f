// The description of a small call, the program that was planned for it, and running that program.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace small_calls {

using c10::IValue;
using i64 = int64_t;

constexpr size_t MAX_DESCRIPTIONS = 16384;  // of each op
constexpr i64 MAX_ELEMENTS = 1 << 19;       // of the first tensor; a call with a larger one is not described
constexpr uintptr_t ALIGNMENT = 16;
using RunProgram = int (*)(const void* program, const void* addresses);

// ---- what answers.py passes
// Where an address of a program comes from: `offset` bytes after the start of tensor number `tensor` of the
// call, or of output number -1 - `tensor`.
struct AddressSource {
    i64 tensor, offset;
};
struct CallProgram {
    const void* program;
    std::vector<AddressSource> addresses;
    i64 cleared_outputs;  // bit i: output i starts as zeros
};

// ---- what is remembered for a description
struct Output {
    std::vector<i64> size, stride;
    at::ScalarType dtype;
};
struct Answer {
    CallProgram call;
    std::vector<Output> outputs;
    enum { Tensor, List, Nothing } returns;
};

struct Op {
    std::string name;
    RunProgram run;
    bool packs_first;  // a first tensor that is not contiguous is copied
    std::unordered_map<std::string, std::unique_ptr<Answer>> answers;  // null: no program serves such a call
    std::unordered_set<size_t> seen_once;                              // hashes of descriptions
};
// Guards everything that this library remembers.
extern std::mutex tables_mutex;
// Returns whether C++ may answer calls.
bool answers_calls();

// The description of a call, which is everything that its program depends on, and the addresses of its
// tensors in order. An address is that of the tensor's first element, wherever its storage begins; it is read
// again at each call.
struct CallDescription {
    std::string key;
    std::vector<const void*> addresses;
    at::Tensor packed;  // the contiguous copy of the first tensor, if there is one

    CallDescription() {
        key.reserve(384);
        addresses.reserve(12);
    }

    // Returns whether a matrix is the transpose of a contiguous one.
    static bool is_transposed(const at::Tensor& t) {
        return t.dim() == 2 && t.stride(0) == 1 && t.stride(1) == t.size(0);
    }
    void add_number(i64 value) { key.append((const char*)&value, sizeof value); }
    void add_number_of_kind(char kind, i64 value) {
        key.push_back(kind);
        add_number(value);
    }
    void add_absent_tensor() {
        key.push_back('n');
        addresses.push_back(nullptr);
    }
    bool add_tensor(const at::Tensor& t, bool pack) {
        if (!t.defined()) {
            add_absent_tensor();
            return true;
        }
        if (!t.is_cpu() || t.layout() != at::kStrided || t.is_neg() || t.is_conj()) return false;
        const at::Tensor* source = &t;
        char kind = 't';
        if (!t.is_contiguous()) {
            if (pack) {
                packed = t.contiguous();
                source = &packed;
            } else if (is_transposed(t)) {
                kind = 'v';
            } else {
                return false;
            }
        }
        key.push_back(kind);
        key.push_back(char(t.scalar_type()));
        key.push_back(char(t.dim()));
        for (const i64 size : t.sizes()) add_number(size);
        const void* address = source->const_data_ptr();
        // Memory that the caller has freed has no address. An absent tensor has none either: Python tells
        // them apart.
        if (!address) return false;
        // A program may read four-byte numbers in a tensor of bytes, so the alignment belongs to the
        // description.
        key.push_back(char(reinterpret_cast<uintptr_t>(address) % ALIGNMENT));
        addresses.push_back(address);
        return true;
    }
    bool add_argument(const IValue& value, bool pack) {
        if (value.isTensor()) return add_tensor(value.toTensor(), pack);
        if (value.isNone()) {
            add_absent_tensor();
        } else if (value.isString()) {
            const std::string& text = value.toStringRef();
            add_number_of_kind('s', i64(text.size()));
            key.append(text);
        } else if (value.isInt()) {
            add_number_of_kind('i', value.toInt());
        } else if (value.isBool()) {
            key.push_back(value.toBool() ? '1' : '0');
        } else if (value.isIntList()) {
            const auto numbers = value.toIntList();
            add_number_of_kind('I', i64(numbers.size()));
            for (const i64 number : numbers) add_number(number);
        } else if (value.isTensorList()) {
            const auto tensors = value.toTensorList();
            add_number_of_kind('T', i64(tensors.size()));
            for (size_t i = 0; i < tensors.size(); i++) {
                if (!add_tensor(tensors.get(i), false)) return false;
            }
        } else {
            return false;
        }
        return true;
    }
    // Returns false for a call that no program serves.
    bool add_arguments(at::ArrayRef<IValue> arguments, bool packs_first) {
        if (arguments[0].isTensor() && arguments[0].toTensor().numel() > MAX_ELEMENTS) return false;
        for (size_t i = 0; i < arguments.size(); i++) {
            if (!add_argument(arguments[i], packs_first && i == 0)) return false;
        }
        return true;
    }
};

// Allocates the outputs and runs the program. Returns false if the program has no kernel or no memory.
inline bool compute(const Op& op, const Answer& answer, const CallDescription& description,
                    std::vector<at::Tensor>& outputs) {
    const CallProgram& call = answer.call;
    std::vector<const char*> output_addresses;
    output_addresses.reserve(answer.outputs.size());
    outputs.reserve(answer.outputs.size());
    for (const Output& output : answer.outputs) {
        at::Tensor t(at::detail::empty_strided_cpu(output.size, output.stride, output.dtype));
        void* data = t.mutable_data_ptr();
        if (call.cleared_outputs >> outputs.size() & 1) memset(data, 0, t.nbytes());
        output_addresses.push_back((const char*)data);
        outputs.push_back(std::move(t));
    }
    std::vector<const void*> addresses;
    addresses.reserve(call.addresses.size());
    for (const AddressSource& source : call.addresses) {
        const char* start = source.tensor < 0 ? output_addresses[size_t(-1 - source.tensor)]
                                              : (const char*)description.addresses[size_t(source.tensor)];
        addresses.push_back(start ? start + source.offset : nullptr);
    }
    at::get_num_threads();  // tells OpenMP, in a thread that has not asked yet
    return op.run(call.program, addresses.data()) == 0;
}

}  // namespace small_calls
